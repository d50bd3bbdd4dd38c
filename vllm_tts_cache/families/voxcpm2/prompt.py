"""A clone's prompt on VoxCPM2: as many placeholder ids as the worker makes positions.

What it is made of travels beside the placeholders: the text's ids, the name of the
mode, and whose reference it is. A position is a token, or one of the reference's. In
the mode ``reference`` these stand before the text, between two marks; in
``continuation`` they follow it, and the transcript stands before it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_tts_cache.errors import TTSCacheError
from vllm_tts_cache.families.networks.prompts import (
    MODE,
    Reference,
    engine_prompt,
    refuse_tokens,
)
from vllm_tts_cache.families.voxcpm2.family import CONTINUATION, REFERENCE
from vllm_tts_cache.families.voxcpm2.positions import num_positions
from vllm_tts_cache.speaker.family import Mode
from vllm_tts_cache.speaker.reference import FIELD

TEXT_IDS = "text_token_ids"  # as the host's talker reads them

_NUM_MARKS = {REFERENCE: 2, CONTINUATION: 0}
_NUM_STARTS = 1  # where the audio begins that is to be made


class PromptBuilder:
    """Builds prompts with a checkpoint's tokenizer.

    Args:
        tokenizer: The checkpoint's.
        split_map: Ids of several Chinese characters -> those of each, as the host
            makes it.
    """

    def __init__(self, tokenizer: Any, split_map: dict[int, list[int]]):
        self._tokenizer = tokenizer
        self._split_map = split_map
        added = tokenizer.added_tokens_decoder.values()
        self._control_tokens = sorted(
            {*tokenizer.all_special_tokens, *(t.content for t in added if t.special)}
        )

    def clone(
        self, text: str, transcript: str | None, *, mode: Mode, clip: Reference
    ) -> dict[str, Any]:
        """Return the prompt, see `PromptAdapter`."""
        ids = self._ids(text)
        if mode is CONTINUATION:
            ids = [*self._ids(transcript or ""), *ids]
        made = num_positions(clip.num_samples, clip.sample_rate_hz)
        total = count_positions(mode, num_ids=len(ids), num_positions=made)
        information = {FIELD: clip.ref.to_wire(), MODE: mode.name, TEXT_IDS: [ids]}
        return engine_prompt([1] * total, information)

    def check_text(self, field: str, text: str) -> None:
        """Refuse a control token in a text.

        The host takes an id of a text's beginning off where it counts the positions,
        and one more where it makes them. So a text that began with it ended the engine.

        Raises: InvalidSpeakerError.
        """
        refuse_tokens(self._control_tokens, field, text)

    def _ids(self, text: str) -> list[int]:
        from vllm_omni.model_executor.models.voxcpm2.voxcpm2_talker import (
            split_multichar_chinese,
        )

        ids = self._tokenizer.encode(text, add_special_tokens=True)
        ids = split_multichar_chinese(ids, self._split_map)
        return ids[1:] if ids[:1] == [self._tokenizer.bos_token_id] else ids


def count_positions(mode: Mode, *, num_ids: int, num_positions: int) -> int:
    """Return the length of a prompt; the worker has to make as many positions.

    Args:
        mode: How it is cloned.
        num_ids: Of text and transcript.
        num_positions: Of the reference.
    """
    return num_ids + _NUM_STARTS + num_positions + _NUM_MARKS[mode]


def ids_of_request(info: Mapping[str, Any]) -> Sequence[int]:
    """Read the ids of transcript and text out of a request's additional information.

    Raises: TTSCacheError if they are not there.
    """
    match info.get(TEXT_IDS):
        case [[*ids]]:
            return ids
        case other:
            raise TTSCacheError(f"{TEXT_IDS} holds no ids but {other!r:.60}")
