"""A clone's prompt on Breeze-TTS-2: the host's, without the waveform.

It is of placeholders: what stands at them are a transcript, the reference's codes and a
text, and the worker has all three.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from vllm_tts_cache.errors import InvalidSpeakerError
from vllm_tts_cache.families.networks.qwen3_codec.frames import (
    CODEC_RATE_HZ,
    SAMPLES_PER_FRAME,
    num_codec_frames,
)
from vllm_tts_cache.speaker.reference import FIELD, SpeakerRef

# Where the host's conditioning is, in its additional information.
CONDITIONING = "breeze_prompt"
WAVEFORM = "reference_waveform"
# Round an instruction; its tokenizer may or may not call them special.
_INSTRUCTION_TOKENS = frozenset({"<ins_bos>", "<ins_eos>"})


def silence(num_samples: int, sample_rate_hz: int) -> tuple[np.ndarray, int]:
    """Return what the host takes for a clip: as many frames, and no sound in them."""
    num_frames = num_codec_frames(num_samples, sample_rate_hz)
    return np.zeros(num_frames * SAMPLES_PER_FRAME, np.float32), CODEC_RATE_HZ


def by_address(prompt: dict[str, Any], ref: SpeakerRef) -> dict[str, Any]:
    """Put the speaker in the place of the silence that the host built it with."""
    information = prompt["additional_information"]
    del information[WAVEFORM]
    information[FIELD] = ref.to_wire()
    return prompt


def control_tokens(tokenizer: Any) -> list[str]:
    """Return what no text may hold; its tokenizer takes milliseconds to tell."""
    # Its vocabulary has added tokens that are none, for newlines say.
    added = tokenizer.added_tokens_decoder.values()
    special = {token.content for token in added if token.special}
    return sorted(_INSTRUCTION_TOKENS | special)


def check_text(refused: Iterable[str], field: str, text: str) -> None:
    """Refuse a control token in a text.

    Raises: InvalidSpeakerError.
    """
    for token in refused:
        if token in text:
            reason = f"{token!r} is a control token of the model; leave it out"
            raise InvalidSpeakerError(field, reason)
