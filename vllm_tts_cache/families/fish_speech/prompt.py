"""The prompt of an in-context clone: real token ids, and a salt that names the voice.

Requests that speak other texts with one voice begin with the same ids under the same
salt, so the host's prefix cache keeps one KV prefix for all of them. The ids hold only
the semantic codes; the residual ones are told apart by the salt.
"""

import hashlib
import json
import sys
from array import array
from dataclasses import dataclass
from typing import Any

from vllm_omni.model_executor.models.fish_speech.prompt_utils import (
    build_fish_voice_clone_prompt_ids,
)

from vllm_tts_cache.families.fish_speech.text import (
    checked_text,
    normalised,
    transcript,
)
from vllm_tts_cache.families.networks import rows
from vllm_tts_cache.families.networks.prompts import engine_prompt
from vllm_tts_cache.families.networks.rows import ReferenceRows
from vllm_tts_cache.speaker.reference import FIELD, SpeakerRef
from vllm_tts_cache.store.encoding import Array, EncodingKey

_AUDIO_START = "<|audio_start|>"
_ANY_TEXT = "a"
# The objects around a part's ids and texts: the part, its key and the key's digests,
# and the entry of an ordered dict.
_NUM_OBJECT_BYTES = 700


@dataclass(frozen=True, slots=True, kw_only=True)
class ClonePrompt:
    """What the engine is given.

    Attributes:
        token_ids: Of text and semantic codes.
        reference: Where the codes stand among them.
        salt: Equal for all texts of one voice, different for any other voice.
    """

    token_ids: list[int]
    reference: ReferenceRows
    salt: str

    def to_engine(self, ref: SpeakerRef) -> dict[str, Any]:
        """Return the host's prompt; ``ref`` says whose codes stand in it."""
        information = {FIELD: ref.to_wire(), rows.FIELD: self.reference.to_wire()}
        return engine_prompt(self.token_ids, information, self.salt)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VoicePart:
    """All of a voice's prompts but their text.

    Attributes:
        before: Token ids that stand before the text, the codes among them.
        after: Those behind it.
        reference: Where the codes stand.
        salt: As of `ClonePrompt`.
    """

    before: "array[int]"
    after: "array[int]"
    reference: ReferenceRows
    salt: str

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, with its key and its place in a cache."""
        parts = (self.before, self.after, self.salt)
        return _NUM_OBJECT_BYTES + sum(map(sys.getsizeof, parts))


def salt_of(key: EncodingKey, ref_text: str, num_clips: int = 1) -> str:
    """Return what names a voice: its encoding, and its transcript in any spelling.

    It reads the whole transcript, so it is called once for each `VoicePart`, from
    which requests take the salt.

    Args:
        key: Of the encoding.
        ref_text: The transcript; ``checked_text`` has let it pass.
        num_clips: Of the audio.
    """
    spoken = transcript(ref_text, num_clips)
    named = [key.audio_sha256, key.encoder_fingerprint, spoken]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()


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
        self,
        text: str,
        ref_text: str,
        key: EncodingKey,
        codes: Array,
        num_clips: int = 1,
    ) -> ClonePrompt:
        """Build the prompt that speaks ``text`` as the reference does.

        Args:
            text: What to say; ``checked_text`` has let it pass.
            ref_text: What the reference says; likewise.
            key: Of the encoding that ``codes`` is of.
            codes: ``(num_frames, 10)``, the semantic codebook first.
            num_clips: Of which they are; ``ref_text`` has a line for each.
        """
        return self.speak(self.voice(ref_text, key, codes, num_clips), text)

    def voice(
        self, ref_text: str, key: EncodingKey, codes: Array, num_clips: int = 1
    ) -> VoicePart:
        """Build what all of a voice's prompts have in common; arguments as `clone`.

        It takes milliseconds, so it runs off the event loop, once per voice and not per
        request: the adapter keeps the part.
        """
        semantic = (codes[:, 0].astype(int) + self.first_semantic_id).tolist()
        # The host names one speaker where nobody is named; here somebody is.
        spoken = transcript(ref_text, num_clips)
        without_text = self._host_ids("", spoken, semantic)
        with_text = self._host_ids(_ANY_TEXT, spoken, semantic)
        # The host puts ids together part by part, so this is where a text stands; what
        # follows is a control token, which no text begins with.
        pairs = enumerate(zip(without_text, with_text, strict=False))
        at = next(i for i, (one, other) in pairs if one != other)
        # The first one: no text holds this token, `checked_text` sees to that.
        audio_start = self.tokenizer.convert_tokens_to_ids(_AUDIO_START)
        start = without_text.index(audio_start) + 1
        return VoicePart(
            before=array("i", without_text[:at]),
            after=array("i", without_text[at:]),
            reference=ReferenceRows.behind(without_text[:start], len(semantic)),
            salt=salt_of(key, ref_text, num_clips),
        )

    def speak(self, voice: VoicePart, text: str) -> ClonePrompt:
        """Put a text between; ``checked_text`` has let it pass."""
        text_ids = self.tokenizer.encode(normalised(text), add_special_tokens=False)
        return ClonePrompt(
            token_ids=[*voice.before, *text_ids, *voice.after],
            reference=voice.reference,
            salt=voice.salt,
        )

    def check_text(self, field: str, text: str) -> None:
        """Refuse text that the model would read as something else.

        Raises: InvalidSpeakerError.
        """
        checked_text(field, text)

    def _host_ids(self, text: str, ref_text: str, semantic: list[int]) -> list[int]:
        return build_fish_voice_clone_prompt_ids(
            self.tokenizer, text, ref_text, semantic
        )[0]
