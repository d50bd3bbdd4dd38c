"""The prompt of a clone on Audio8 TTS: real token ids, semantic codes among them."""

from array import array
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vllm_omni.model_executor.models.audio8_tts import prompt_utils as host

from vllm_tts_cache.errors import InvalidSpeakerError
from vllm_tts_cache.families.audio8_tts.family import CODEC
from vllm_tts_cache.families.networks import prompts
from vllm_tts_cache.offline import PreparedSpeaker
from vllm_tts_cache.speaker.reference import SpeakerRef
from vllm_tts_cache.store.encoding import Array, EncodingKey

# More characters than the model has positions. The host's expression for a control
# token reads from each opening to the end of the text.
MAX_CHARS = 16_384
MAX_OPENINGS = 64
_OPENING = "<|"
_NUM_OBJECT_BYTES = 400


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SemanticCodes:
    """The part of an encoding that a prompt holds: a semantic code for each frame."""

    key: EncodingKey
    codes: "array[int]"

    @classmethod
    def of(cls, key: EncodingKey, codes: Array) -> "SemanticCodes":
        """Take the semantic codes out of ``(num_frames, 10)`` codes."""
        return cls(key=key, codes=array("i", codes[:, 0].tolist()))

    @property
    def num_bytes(self) -> int:
        """Memory that the object takes."""
        return _NUM_OBJECT_BYTES + self.codes.itemsize * len(self.codes)


class PromptBuilder(prompts.SemanticPromptBuilder):
    """Builds prompts with a checkpoint's tokenizer."""

    def clone(
        self, text: str, ref_text: str, *, ref: SpeakerRef, semantic: SemanticCodes
    ) -> dict[str, Any]:
        """Return the prompt that speaks ``text`` as the reference does.

        `check_text` has checked both texts; the codes of ``semantic`` become token ids.
        """
        semantic_ids = [code + self.first_semantic_id for code in semantic.codes]
        token_ids, start, _, _ = host.build_voice_clone_prompt_ids(
            self.tokenizer, text, ref_text, semantic_ids
        )
        reference = prompts.ReferenceRows.behind(token_ids[:start], len(semantic_ids))
        # No id holds the residual codes, so the salt names the encoding.
        key = semantic.key
        salt = f"{key.audio_sha256} {key.encoder_fingerprint}"
        return prompts.prompt_with_rows(token_ids, ref, reference, salt)

    def check_text(self, field: str, text: str) -> None:
        """Refuse text that the host refuses, or that it would check for long.

        Raises: InvalidSpeakerError.
        """
        if len(text) > MAX_CHARS:
            reason = f"it has {len(text)} characters, at most {MAX_CHARS} are allowed"
            raise InvalidSpeakerError(field, reason)
        if (number := text.count(_OPENING)) > MAX_OPENINGS:
            reason = f"it has {number} times {_OPENING!r}, at most {MAX_OPENINGS}"
            raise InvalidSpeakerError(field, reason)
        try:
            host.normalize_text(text)
        except ValueError as exc:
            raise InvalidSpeakerError(field, str(exc)) from exc


class Audio8Prompts(prompts.OfflinePrompts):
    """Builds one checkpoint's prompts for an ``Omni`` engine."""

    def _clone(self, speaker: PreparedSpeaker, text: str) -> dict[str, Any]:
        assert speaker.ref_text is not None  # `prepare` has refused it
        ref, clone = speaker.ref, self._builder.clone
        key, encoding = self._encoding(ref, CODEC)
        semantic = SemanticCodes.of(key, encoding["codes"])
        return clone(text, speaker.ref_text, ref=ref, semantic=semantic)

    @cached_property
    def _builder(self) -> PromptBuilder:
        from transformers import AutoTokenizer
        from vllm_omni.model_executor.models.audio8_tts.configuration_audio8_tts import (  # noqa: E501
            Audio8TTSConfig,
        )

        return PromptBuilder(
            tokenizer=AutoTokenizer.from_pretrained(self._model),
            first_semantic_id=Audio8TTSConfig(**self._config).semantic_begin_id,
        )
