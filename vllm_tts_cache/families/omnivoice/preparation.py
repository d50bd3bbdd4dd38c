"""What the official package does with a clip before it is encoded.

Source: ``OmniVoice.create_voice_clone_prompt`` of omnivoice 0.2.1, with a transcript.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.families.networks.sinc_resample import resample_by_function
from vllm_tts_cache.families.omnivoice import silence

# Raise it with any change here, or in `silence`, that changes what comes out.
REVISION = 1
# A clip is made so loud if it is quieter, and what is spoken is made as quiet again.
LOUDNESS = 0.1

Samples = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PreparedClip:
    """A clip as it is encoded.

    Attributes:
        samples: ``(num_samples,)`` at 24 kHz, whole frames.
        rms: How loud it was, as the root mean square of its samples; a float32.
    """

    samples: Samples
    rms: np.float32


def prepare(audio: ReferenceAudio, samples_per_frame: int) -> PreparedClip:
    """Make a clip loud enough, shorten its silence and cut it to whole frames.

    Returns: A clip without samples, if it is all silence or too short for a frame.
    """
    # As a channel of a clip: how numpy sums up depends on the shape.
    channel = resample_by_function(audio, silence.RATE_HZ)[np.newaxis]
    rms = np.sqrt(np.mean(channel**2))
    if 0 < rms < LOUDNESS:
        channel = channel * LOUDNESS / float(rms)
    samples = silence.remove_silence(channel[0])
    num_whole = samples.size - samples.size % samples_per_frame
    return PreparedClip(samples=samples[:num_whole], rms=rms)


def settings() -> dict[str, Any]:
    """Return all that decides what comes out, for the encoder's fingerprint."""
    return {
        "name": "omnivoice 0.2.1",
        "revision": REVISION,
        "loudness": LOUDNESS,
        "silence_db": silence.SILENCE_DB,
        "longest_ms": silence.LONGEST_MS,
        "leading_ms": silence.LEADING_MS,
        "trailing_ms": silence.TRAILING_MS,
        "step_ms": silence.STEP_MS,
        "edge_step_ms": silence.EDGE_STEP_MS,
    }
