"""A clone's prompt on VoxCPM2: a placeholder id for each position the worker makes.

The worker makes them from the additional information: the text's ids, the name of the
mode, and the reference's content address. A position is a token, or a patch of the
reference. In the mode ``reference`` the reference stands before the text, between two
marks; in ``continuation`` it follows the text, which begins with the transcript.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from vllm_tts_cache.errors import TTSCacheError
from vllm_tts_cache.families.networks import prompts
from vllm_tts_cache.families.networks.prompts import MODE
from vllm_tts_cache.families.voxcpm2.family import CONTINUATION, FAMILY, REFERENCE
from vllm_tts_cache.families.voxcpm2.positions import num_positions
from vllm_tts_cache.speaker.family import Mode
from vllm_tts_cache.speaker.reference import FIELD

TEXT_IDS = "text_token_ids"  # as the host's talker reads them

_NUM_MARKS = {REFERENCE: 2, CONTINUATION: 0}
_NUM_STARTS = 1  # the mark where new audio begins


class PromptBuilder(prompts.PromptBuilder):
    """Builds prompts with a checkpoint's tokenizer.

    ``split_map``, which the host makes, has the ids of several Chinese characters ->
    ids of each.
    """

    family = FAMILY

    def __init__(self, tokenizer: Any, split_map: dict[int, list[int]]):
        super().__init__(tokenizer)
        self._split_map = split_map

    def clone(
        self, text: str, transcript: str | None, *, mode: Mode, clip: prompts.Reference
    ) -> dict[str, Any]:
        """Return the prompt, see `PromptAdapter`."""
        ids = self._ids(text)
        if mode is CONTINUATION:
            ids = [*self._ids(transcript or ""), *ids]
        made = num_positions(clip.num_samples, clip.sample_rate_hz)
        total = count_positions(mode, num_ids=len(ids), num_positions=made)
        information = {FIELD: clip.ref.to_wire(), MODE: mode.name, TEXT_IDS: [ids]}
        return prompts.engine_prompt([1] * total, information)

    def _ids(self, text: str) -> list[int]:
        from vllm_omni.model_executor.models.voxcpm2.voxcpm2_talker import (
            split_multichar_chinese,
        )

        ids = self._tokenizer.encode(text, add_special_tokens=True)
        ids = split_multichar_chinese(ids, self._split_map)
        return ids[1:] if ids[:1] == [self._tokenizer.bos_token_id] else ids


def count_positions(mode: Mode, *, num_ids: int, num_positions: int) -> int:
    """Return the length of a prompt; the worker has to make as many positions."""
    return num_ids + _NUM_STARTS + num_positions + _NUM_MARKS[mode]


def ids_of_request(info: Mapping[str, Any]) -> Sequence[int]:
    """Read the ids of transcript and text out of a request's additional information.

    Raises: TTSCacheError if the ids are missing.
    """
    match info.get(TEXT_IDS):
        case [[*ids]]:
            return ids
        case other:
            raise TTSCacheError(f"{TEXT_IDS} is not one list of ids: {other!r:.60}")


class VoxCPM2Prompts(prompts.OfflinePrompts):
    """Builds one checkpoint's prompts for an ``Omni`` engine."""

    @cached_property
    def _builder(self) -> PromptBuilder:
        from transformers import AutoTokenizer
        from vllm_omni.model_executor.models.voxcpm2.voxcpm2_talker import (
            build_cjk_split_map,
        )

        # As the host does: the released tokenizer's class is a file beside it.
        read = AutoTokenizer.from_pretrained
        tokenizer = read(self._model, trust_remote_code=True)
        return PromptBuilder(tokenizer, build_cjk_split_map(tokenizer))
