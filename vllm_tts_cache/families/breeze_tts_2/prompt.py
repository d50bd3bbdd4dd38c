"""A clone's prompt on Breeze-TTS-2: the host's, without the waveform.

It is of placeholders: what stands at them are a transcript, the reference's codes and a
text, and the worker has all three.
"""

from functools import cached_property
from typing import Any

import numpy as np

from vllm_tts_cache.families.networks.prompts import Reference, refuse_tokens
from vllm_tts_cache.families.networks.qwen3_codec.frames import (
    CODEC_RATE_HZ,
    SAMPLES_PER_FRAME,
    num_codec_frames,
)
from vllm_tts_cache.speaker.family import Mode
from vllm_tts_cache.speaker.reference import FIELD, SpeakerRef

# Where the host's conditioning is, in its additional information.
CONDITIONING = "breeze_prompt"
WAVEFORM = "reference_waveform"
# Round an instruction; its tokenizer may or may not call them special.
_INSTRUCTION_TOKENS = frozenset({"<ins_bos>", "<ins_eos>"})


def silence(clip: Reference) -> tuple[np.ndarray, int]:
    """Return what the host takes for a clip: as many frames, and no sound in them."""
    num_frames = num_codec_frames(clip.num_samples, clip.sample_rate_hz)
    return np.zeros(num_frames * SAMPLES_PER_FRAME, np.float32), CODEC_RATE_HZ


def by_address(prompt: dict[str, Any], ref: SpeakerRef) -> dict[str, Any]:
    """Put the speaker in the place of the silence that the host built it with."""
    information = prompt["additional_information"]
    del information[WAVEFORM]
    information[FIELD] = ref.to_wire()
    return prompt


class PromptBuilder:
    """Builds the prompts of batch jobs, and checks all texts.

    Args:
        tokenizer: The checkpoint's.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def clone(
        self,
        text: str,
        transcript: str | None,
        *,
        mode: Mode,  # noqa: ARG002  there is one
        clip: Reference,
    ) -> dict[str, Any]:
        """Return the prompt, see `PromptAdapter`."""
        from vllm_omni.model_executor.models.breeze_tts_2.prompt import (
            build_breeze_prompt,
        )

        assert transcript is not None  # the mode needs one
        prompt: Any = build_breeze_prompt(
            self._tokenizer, text, ref_audio=silence(clip), ref_text=transcript
        )
        return by_address(prompt, clip.ref)

    def check_text(self, field: str, text: str) -> None:
        """Refuse a control token in a text.

        Raises: InvalidSpeakerError.
        """
        refuse_tokens(self._control_tokens, field, text)

    @cached_property
    def _control_tokens(self) -> list[str]:
        """What no text may hold; its tokenizer takes milliseconds to tell."""
        # Its vocabulary has added tokens that are none, for newlines say.
        added = self._tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special}
        return sorted(_INSTRUCTION_TOKENS | special)
