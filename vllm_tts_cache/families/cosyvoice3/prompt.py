"""A clone's prompt on CosyVoice3: as many placeholder ids as the worker makes rows.

The talker reads ``[start] [texts] [turn] [codes]``: the prompt's text and what is to be
said, then, in a zero-shot clone, the reference's speech tokens. Ids of texts and codes
are numbers of two tables and mean nothing beside one another, so the placeholders stand
for both. What they are made of travels beside them: the ids of either text, the name
of the mode, and whose reference it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_tts_cache.errors import InvalidSpeakerError, TTSCacheError
from vllm_tts_cache.families.cosyvoice3.family import CROSS_LINGUAL, ZERO_SHOT
from vllm_tts_cache.families.cosyvoice3.positions import num_used_tokens
from vllm_tts_cache.families.networks.prompts import MODE, Reference, engine_prompt
from vllm_tts_cache.speaker.family import Mode
from vllm_tts_cache.speaker.reference import FIELD

TEXT_IDS = "tts_cache_text_ids"

# The model was trained on prompts that hold this mark, once: what stands before it is
# no transcript. The official code ends a request without it.
END_OF_PROMPT = "<|endofprompt|>"
SYSTEM = "You are a helpful assistant."

NUM_MARKS = 2  # the start and the turn
# Any id will do: no row is looked up by it.
_PLACEHOLDER = 1


@dataclass(frozen=True, slots=True)
class Texts:
    """What the talker reads: the prompt's text, then what it is to say."""

    prompt: str
    spoken: str


def texts_of(
    mode: Mode, text: str, *, transcript: str | None, instructions: str | None
) -> Texts:
    """Return both texts, with the mark where the official examples have it.

    A text that has the mark already is taken as it is.

    Raises: InvalidSpeakerError if the mode has no instructions and needs some.

    Source: ``example.py`` of the official code, and ``frontend_*`` of its front end.
    """
    if mode is CROSS_LINGUAL:
        return Texts("", _marked(text, f"{SYSTEM}{END_OF_PROMPT}{{}}"))
    if mode is ZERO_SHOT:
        return Texts(_marked(transcript or "", f"{SYSTEM}{END_OF_PROMPT}{{}}"), text)
    told = needed_instructions(instructions)
    return Texts(_marked(told, f"{SYSTEM} {{}}{END_OF_PROMPT}"), text)


def needed_instructions(instructions: str | None) -> str:
    """Return the instructions of a mode that needs some.

    Raises: InvalidSpeakerError if there are none.
    """
    if instructions is None or not instructions.strip():
        reason = "say how to speak, as this mode does; or leave the mode out"
        raise InvalidSpeakerError("instructions", reason)
    return instructions


def _marked(text: str, template: str) -> str:
    return text if END_OF_PROMPT in text else template.format(text)


class PromptBuilder:
    """Builds prompts with the host's tokenizer of a checkpoint."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def clone(self, texts: Texts, *, mode: Mode, clip: Reference) -> dict[str, Any]:
        """Return the prompt that speaks as the clip does."""
        ids = self._ids(texts.prompt), self._ids(texts.spoken)
        num_ids = sum(map(len, ids))
        num_tokens = num_used_tokens(clip.num_samples, clip.sample_rate_hz)
        length = count_positions(mode, num_ids=num_ids, num_tokens=num_tokens)
        information = {FIELD: clip.ref.to_wire(), MODE: mode.name, TEXT_IDS: [*ids]}
        return engine_prompt([_PLACEHOLDER] * length, information)

    def _ids(self, text: str) -> list[int]:
        # The tokenizer makes nothing of nothing, in a type of its own.
        return self._tokenizer.encode(text) if text else []


def count_positions(mode: Mode, *, num_ids: int, num_tokens: int) -> int:
    """Return the length of a prompt; the worker has to make as many rows.

    Args:
        mode: How it is cloned.
        num_ids: Of both texts.
        num_tokens: Of the reference that are used.
    """
    return NUM_MARKS + num_ids + (num_tokens if tells_codes(mode) else 0)


def tells_codes(mode: Mode) -> bool:
    """Whether the talker reads the reference's speech tokens."""
    return mode is ZERO_SHOT


def ids_of_request(info: Mapping[str, Any], vocab_size: int) -> Sequence[int]:
    """Read both texts' ids out of a request's additional information, in their order.

    Raises: TTSCacheError if they are not there, or are none of the model's.
    """
    match info.get(TEXT_IDS):
        case [[*prompt], [*spoken]] if all(isinstance(i, int) for i in prompt + spoken):
            ids = prompt + spoken
        case other:
            raise TTSCacheError(f"{TEXT_IDS} holds no ids but {other!r:.60}")
    if not ids or min(ids) < 0 or max(ids) >= vocab_size:
        # On a GPU an index out of range would end the process.
        raise TTSCacheError("an id of its texts is none of the model's")
    return ids
