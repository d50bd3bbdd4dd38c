"""The prompt of a clone on Audio8 TTS: real token ids, semantic codes among them."""

from array import array
from dataclasses import dataclass
from typing import Any

from vllm_omni.model_executor.models.audio8_tts.prompt_utils import (
    build_voice_clone_prompt_ids,
    normalize_text,
)

from vllm_tts_cache.errors import InvalidSpeakerError
from vllm_tts_cache.families.networks import rows
from vllm_tts_cache.families.networks.prompts import engine_prompt
from vllm_tts_cache.families.networks.rows import ReferenceRows
from vllm_tts_cache.speaker.reference import FIELD, SpeakerRef
from vllm_tts_cache.store.encoding import Array, EncodingKey

# More than the model has positions for; and the host's expression for a control token
# walks from each opening to the end of the text.
MAX_CHARS = 16_384
MAX_OPENINGS = 64
_OPENING = "<|"
_NUM_OBJECT_BYTES = 400


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SemanticCodes:
    """What a prompt holds of an encoding.

    Attributes:
        key: Of the encoding.
        codes: Of the semantic codebook, one a frame.
    """

    key: EncodingKey
    codes: "array[int]"

    @classmethod
    def of(cls, key: EncodingKey, codes: Array) -> "SemanticCodes":
        """Take them out of ``(num_frames, 10)`` codes."""
        return cls(key=key, codes=array("i", codes[:, 0].tolist()))

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return _NUM_OBJECT_BYTES + self.codes.itemsize * len(self.codes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBuilder:
    """Builds prompts with a checkpoint's tokenizer.

    Attributes:
        tokenizer: The checkpoint's.
        first_semantic_id: Token id of semantic code 0, from its configuration.
    """

    tokenizer: Any
    first_semantic_id: int

    def clone(
        self, text: str, ref_text: str, *, ref: SpeakerRef, semantic: SemanticCodes
    ) -> dict[str, Any]:
        """Return the prompt that speaks ``text`` as the reference does.

        Args:
            text: What to say; `check_text` has let it pass.
            ref_text: What the reference says; likewise.
            ref: Whose codes.
            semantic: Those of them that are token ids.
        """
        semantic_ids = [code + self.first_semantic_id for code in semantic.codes]
        token_ids, start, _, _ = build_voice_clone_prompt_ids(
            self.tokenizer, text, ref_text, semantic_ids
        )
        reference = ReferenceRows.behind(token_ids[:start], len(semantic_ids))
        information = {FIELD: ref.to_wire(), rows.FIELD: reference.to_wire()}
        # The residual codes are in no id.
        key = semantic.key
        salt = f"{key.audio_sha256} {key.encoder_fingerprint}"
        return engine_prompt(token_ids, information, salt)

    def check_text(self, field: str, text: str) -> None:
        """Refuse what the host refuses in a prompt, and what takes it long to read.

        Raises: InvalidSpeakerError.
        """
        if len(text) > MAX_CHARS:
            reason = f"it has {len(text)} characters, at most {MAX_CHARS} are allowed"
            raise InvalidSpeakerError(field, reason)
        if (number := text.count(_OPENING)) > MAX_OPENINGS:
            reason = f"it has {_OPENING!r} {number} times, at most {MAX_OPENINGS} times"
            raise InvalidSpeakerError(field, reason)
        try:
            normalize_text(text)
        except ValueError as exc:
            raise InvalidSpeakerError(field, str(exc)) from exc
