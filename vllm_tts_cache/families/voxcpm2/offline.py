"""Prompts for VoxCPM2 in an ``Omni`` engine: placeholder ids of the right number."""

from functools import cached_property
from typing import Any

from vllm_tts_cache.families.voxcpm2.positions import num_positions
from vllm_tts_cache.families.voxcpm2.prompt import PromptBuilder
from vllm_tts_cache.offline.speakers import PreparedSpeaker


class VoxCPM2Prompts:
    """Builds the prompts of one checkpoint.

    Args:
        model: Its folder, or Hugging Face id.
    """

    def __init__(self, model: str, _config: object, _encoding: object):
        # A prompt holds no more of a reference than its length.
        self._model = model

    def prompt(
        self, speaker: PreparedSpeaker, text: str, _language: str
    ) -> dict[str, Any]:
        """Return the prompt that speaks ``text``, in the language that it is in.

        Raises: InvalidSpeakerError.
        """
        self._builder.check_text("text", text)
        if speaker.ref_text is not None:
            self._builder.check_text("ref_text", speaker.ref_text)
        return self._builder.clone(
            text,
            speaker.ref_text,
            mode=speaker.mode,
            ref=speaker.ref,
            num_positions=num_positions(speaker.num_samples, speaker.sample_rate_hz),
        )

    @cached_property
    def _builder(self) -> PromptBuilder:
        from transformers import AutoTokenizer
        from vllm_omni.model_executor.models.voxcpm2.voxcpm2_talker import (
            build_cjk_split_map,
        )

        tokenizer = AutoTokenizer.from_pretrained(self._model)
        return PromptBuilder(tokenizer, build_cjk_split_map(tokenizer))
