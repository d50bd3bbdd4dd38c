"""A clone's prompt on Breeze-TTS-2: the host's, without the waveform.

Its ids are placeholders, which the worker replaces by the transcript, the reference's
codes and the text.
"""

from functools import cached_property
from typing import Any

import numpy as np

from vllm_tts_cache.families.breeze_tts_2.family import FAMILY
from vllm_tts_cache.families.networks import prompts
from vllm_tts_cache.families.networks.qwen3_codec import frames
from vllm_tts_cache.speaker.family import Mode
from vllm_tts_cache.speaker.reference import FIELD, SpeakerRef

# Keys of the host's additional_information, for its conditioning and its waveform.
CONDITIONING = "breeze_prompt"
WAVEFORM = "reference_waveform"


def silence(clip: prompts.Reference) -> tuple[np.ndarray, int]:
    """Return silence of as many frames as the clip, as reference audio for the host."""
    num_frames = frames.num_codec_frames(clip.num_samples, clip.sample_rate_hz)
    samples = np.zeros(num_frames * frames.SAMPLES_PER_FRAME, np.float32)
    return samples, frames.CODEC_RATE_HZ


def by_address(prompt: dict[str, Any], ref: SpeakerRef) -> dict[str, Any]:
    """Replace the silence in the host's prompt by the speaker's content address."""
    information = prompt["additional_information"]
    del information[WAVEFORM]
    information[FIELD] = ref.to_wire()
    return prompt


class PromptBuilder(prompts.PromptBuilder):
    """Builds the prompts of batch jobs, and checks all texts."""

    family = FAMILY

    def clone(
        self, text: str, transcript: str | None, *, mode: Mode, clip: prompts.Reference
    ) -> dict[str, Any]:
        """Return the prompt, see `PromptAdapter`."""
        del mode  # there is one
        from vllm_omni.model_executor.models.breeze_tts_2.prompt import (
            build_breeze_prompt,
        )

        assert transcript is not None  # the mode needs one
        prompt: Any = build_breeze_prompt(
            self._tokenizer, text, ref_audio=silence(clip), ref_text=transcript
        )
        return by_address(prompt, clip.ref)


class BreezePrompts(prompts.OfflinePrompts):
    """Builds one checkpoint's prompts for an ``Omni`` engine."""

    @cached_property
    def _builder(self) -> PromptBuilder:
        from transformers import AutoConfig, AutoTokenizer

        config = AutoConfig.from_pretrained(self._model)
        return PromptBuilder(AutoTokenizer.from_pretrained(self._model, config=config))
