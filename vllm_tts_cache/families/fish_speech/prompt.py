"""The prompt of an in-context clone: real token ids, and a salt that names the voice.

All texts of one voice begin with the same ids under the same salt, so the host's prefix
cache keeps one KV prefix for all of them. The ids hold only the semantic codes; the
salt distinguishes the residual ones.

Texts are checked by the host's rules, in one pass: its own expression for a control
token tries every ``<|`` to the end of the text, so 200 KB of them keep it busy for half
a minute.
"""

import hashlib
import json
import re
import sys
from array import array
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vllm_omni.model_executor.models.fish_speech import prompt_utils as host

from vllm_tts_cache.errors import InvalidSpeakerError
from vllm_tts_cache.families.fish_speech.family import CODEC
from vllm_tts_cache.families.networks import prompts
from vllm_tts_cache.offline import PreparedSpeaker
from vllm_tts_cache.speaker.reference import SpeakerRef
from vllm_tts_cache.store.encoding import Array, EncodingKey

_AUDIO_START = "<|audio_start|>"
_ANY_TEXT = "a"
# The objects around a part's ids and texts: the part, its key and the key's digests,
# and the entry of an ordered dict.
_NUM_OBJECT_BYTES = 700

# Over an hour of speech in any language: more than the model has positions for.
MAX_CHARS = 65_536
# The most ``<|`` that begin no token: the host searches each text by its own expression
# once more, and for each of these it may read the text to its end.
MAX_LOOSE_OPENINGS = 16

_OPENING = "<|"
_LEGACY_SPEAKER = re.compile(r"<speaker:(\d+)>")
_SPEAKER = re.compile(r"<\|speaker:\d+\|>")
_ALLOWED = re.compile(r"<\|(?:speaker:\d+|phoneme_start|phoneme_end)\|>")
_MAX_NAMED, _MAX_NAME_CHARS = 4, 40


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VoicePart:
    """The part that all prompts of a voice share: all but the text.

    Attributes:
        before: Token ids that stand before the text, the codes among them.
        after: Token ids that follow the text.
        reference: Where the codes stand.
        salt: Digest of the encoding's key and the transcript: equal for all texts of
            one voice, different for any other voice.
    """

    before: "array[int]"
    after: "array[int]"
    reference: prompts.ReferenceRows
    salt: str

    @property
    def num_bytes(self) -> int:
        """Memory that the part takes, with its key and its entry in a cache."""
        parts = (self.before, self.after, self.salt)
        return _NUM_OBJECT_BYTES + sum(map(sys.getsizeof, parts))


class PromptBuilder(prompts.SemanticPromptBuilder):
    """Builds prompts with a checkpoint's tokenizer."""

    def voice(
        self, ref_text: str, key: EncodingKey, codes: Array, num_clips: int = 1
    ) -> VoicePart:
        """Build what all of a voice's prompts have in common.

        It takes milliseconds, so the adapter calls it off the event loop, and keeps the
        part for all requests of the voice. ``codes`` are ``(num_frames, 10)``, the
        semantic codebook first, of the encoding with this key. With several clips
        ``ref_text``, which ``checked_text`` has checked, has a line for each.
        """
        semantic = (codes[:, 0].astype(int) + self.first_semantic_id).tolist()
        # With a speaker tag, so that the host does not add one.
        spoken = transcript(ref_text, num_clips)
        without_text = self._host_ids("", spoken, semantic)
        with_text = self._host_ids(_ANY_TEXT, spoken, semantic)
        # The host joins the ids of parts, so the first difference is where a text
        # stands: a control token follows it, with which no text begins.
        pairs = enumerate(zip(without_text, with_text, strict=False))
        at = next(i for i, (one, other) in pairs if one != other)
        # The first one: `checked_text` refuses texts that hold this token.
        audio_start = self.tokenizer.convert_tokens_to_ids(_AUDIO_START)
        start = without_text.index(audio_start) + 1
        named = [key.audio_sha256, key.encoder_fingerprint, spoken]
        return VoicePart(
            before=array("i", without_text[:at]),
            after=array("i", without_text[at:]),
            reference=prompts.ReferenceRows.behind(without_text[:start], len(semantic)),
            salt=hashlib.sha256(json.dumps(named).encode()).hexdigest(),
        )

    def speak(self, voice: VoicePart, text: str, ref: SpeakerRef) -> dict[str, Any]:
        """Build the host's prompt of a text, which ``checked_text`` has checked.

        Its codes are those of ``ref``.
        """
        text_ids = self.tokenizer.encode(normalised(text), add_special_tokens=False)
        ids = [*voice.before, *text_ids, *voice.after]
        return prompts.prompt_with_rows(ids, ref, voice.reference, voice.salt)

    def check_text(self, field: str, text: str) -> None:
        """Refuse text that the model would misread. Raises: InvalidSpeakerError."""
        checked_text(field, text)

    def _host_ids(self, text: str, ref_text: str, semantic: list[int]) -> list[int]:
        build = host.build_fish_voice_clone_prompt_ids
        return build(self.tokenizer, text, ref_text, semantic)[0]


class FishSpeechPrompts(prompts.OfflinePrompts):
    """Builds one checkpoint's prompts for an ``Omni`` engine."""

    def _clone(self, speaker: PreparedSpeaker, text: str) -> dict[str, Any]:
        assert speaker.ref_text is not None  # `prepare` has refused it
        key, encoding = self._encoding(speaker.ref, CODEC)
        voice = self._builder.voice(speaker.ref_text, key, encoding["codes"])
        return self._builder.speak(voice, text, speaker.ref)

    @cached_property
    def _builder(self) -> PromptBuilder:
        from transformers import AutoTokenizer
        from vllm_omni.model_executor.models.fish_speech.configuration_fish_speech import (  # noqa: E501
            FishSpeechConfig,
        )

        config = FishSpeechConfig(**self._config)
        return PromptBuilder(
            tokenizer=AutoTokenizer.from_pretrained(self._model),
            first_semantic_id=int(config.semantic_start_token_id),
        )


def checked_text(field: str, text: str) -> str:
    """Return the text as the model takes it, its speaker tags in the model's spelling.

    The time grows with the text: 0.1 ms for the longest one, 30 ms if that is tags
    only. So an event loop leaves long texts to a thread.

    Raises: InvalidSpeakerError: The text is too long, or holds a control token that
    would end or forge a turn; the message names the token.
    """
    if len(text) > MAX_CHARS:
        reason = f"it has {len(text)} characters, at most {MAX_CHARS} are allowed"
        raise InvalidSpeakerError(field, reason)
    spoken = normalised(text)
    tokens, num_loose = control_tokens(spoken)
    if refused := sorted({token for token in tokens if not _ALLOWED.fullmatch(token)}):
        reason = f"it contains unsupported control token(s): {_named(refused)}"
        raise InvalidSpeakerError(field, reason)
    if num_loose > MAX_LOOSE_OPENINGS:
        reason = (
            f"it contains {num_loose} times {_OPENING!r} that begins no tag, at most "
            f"{MAX_LOOSE_OPENINGS} are allowed"
        )
        raise InvalidSpeakerError(field, reason)
    return spoken


def normalised(text: str) -> str:
    """Return the text with its speaker tags in the model's spelling; checks nothing."""
    return _LEGACY_SPEAKER.sub(r"<|speaker:\1|>", text)


def transcript(ref_text: str, num_clips: int = 1) -> str:
    """Return a reference's transcript as the model reads it, with a speaker tag.

    With several clips it has a line for each, and each line gets a tag if it has none.
    Source: ``generate_long`` of fish-speech, which numbers clips as it does speakers.
    """
    spoken = normalised(ref_text)
    lines = [spoken] if num_clips == 1 else spoken.split("\n")
    return "\n".join(
        line if _SPEAKER.search(line) else f"<|speaker:{index}|>{line}"
        for index, line in enumerate(lines)
    )


def control_tokens(text: str) -> tuple[list[str], int]:
    """Find what the host takes for control tokens: ``<|``, then no ``>`` until ``|>``.

    Returns the tokens, in order, and the number of ``<|`` that begin none. All those
    before one ``>`` share it, so if the first begins no token, none of them does.
    """
    tokens: list[str] = []
    *closed, rest = text.split(">")
    num_loose = rest.count(_OPENING)
    for part in closed:
        _, opening, inner = part.partition(_OPENING)
        if inner.endswith("|") and inner != "|":
            tokens.append(f"{opening}{inner}>")
        else:
            num_loose += part.count(_OPENING)
    return tokens, num_loose


def _named(tokens: list[str]) -> str:
    shown = [
        token if len(token) <= _MAX_NAME_CHARS else f"{token[:_MAX_NAME_CHARS]}..."
        for token in tokens[:_MAX_NAMED]
    ]
    num_more = len(tokens) - len(shown)
    return ", ".join(shown) + (f" and {num_more} more" if num_more else "")
