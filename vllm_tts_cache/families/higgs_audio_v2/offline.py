"""Prompts for Higgs Audio v2 in an ``Omni`` engine."""

from functools import cached_property
from typing import Any

from vllm_tts_cache.families.higgs_audio_v2.prompt import (
    PromptBuilder,
    num_reference_rows,
)
from vllm_tts_cache.offline.speakers import PreparedSpeaker


class HiggsAudioV2Prompts:
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
        assert speaker.ref_text is not None  # `prepare` has refused it
        self._builder.check_text("text", text)
        self._builder.check_text("ref_text", speaker.ref_text)
        return self._builder.clone(
            text,
            speaker.ref_text,
            ref=speaker.ref,
            num_rows=num_reference_rows(speaker.num_samples, speaker.sample_rate_hz),
        )

    @cached_property
    def _builder(self) -> PromptBuilder:
        from transformers import AutoTokenizer

        return PromptBuilder(AutoTokenizer.from_pretrained(self._model))
