"""The stored forms of a clip, each of them exact.

A clip that came as whole numbers goes back to FLAC; what a lossy decoder made has no
shorter exact form than the upload itself.

- ``flac``: ``(num_bytes,)`` uint8, a mono FLAC file of 16 or 24 bits,
- ``samples``: ``(num_samples,)`` float32,
- ``upload``: ``(num_bytes,)`` uint8, the file that the client sent.
"""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import soundfile

from vllm_tts_cache.audio.containers import read_blocks
from vllm_tts_cache.audio.decode import downmix
from vllm_tts_cache.audio.limits import AudioLimits
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.errors import InvalidAudioError
from vllm_tts_cache.store.encoding import Array

FLAC, SAMPLES, UPLOAD = "flac", "samples", "upload"
FORMS = (FLAC, SAMPLES, UPLOAD)

# Our own form may be this much larger than the upload and is taken still: it decodes
# to the same samples with every version of every library, and holds no name, picture
# or place that the client's recorder wrote into the file.
MAX_OVERHEAD = 1.05
# What is stored has passed the limits of its day, whatever today's are.
_NO_LIMITS = AudioLimits(
    min_seconds=0.0,
    max_seconds=math.inf,
    min_rate_hz=1,
    max_rate_hz=1 << 31,
    max_channels=1 << 16,
)
# Bits -> what numbers libsndfile is given, and how far they are shifted up in them.
_GRIDS = {16: (np.int16, 0), 24: (np.int32, 8)}


@dataclass(frozen=True, slots=True, eq=False)
class StoredClip:
    """A clip, or several behind each other, in one of the forms."""

    form: str
    array: Array


def shortest(audio: ReferenceAudio, source: bytes | None) -> StoredClip:
    """Choose the form that is no larger than need be.

    It is about as large as the upload at most (5 % more). It takes some tens of
    milliseconds.

    Args:
        audio: What is stored.
        source: The one file that ``audio`` was decoded from; None if there is none.
    """
    stored = StoredClip(SAMPLES, audio.samples)
    if (flac := _exact_flac(audio)) is not None and len(flac) < stored.array.nbytes:
        stored = StoredClip(FLAC, np.frombuffer(flac, np.uint8))
    if source is not None and len(source) * MAX_OVERHEAD < stored.array.nbytes:
        stored = StoredClip(UPLOAD, np.frombuffer(source, np.uint8))
    return stored


def read(
    stored: StoredClip, sample_rate_hz: int, clip_starts: Sequence[int] = (0,)
) -> ReferenceAudio:
    """Read it back, under the address of what it holds.

    Args:
        stored: What was stored.
        sample_rate_hz: Of samples; a file says its own.
        clip_starts: Where the clips begin in it.

    Raises: InvalidAudioError, ValueError.
    """
    if stored.form == SAMPLES:
        samples = cast("npt.NDArray[np.float32]", stored.array)
        return ReferenceAudio.of(samples, sample_rate_hz, clip_starts)
    return _decoded(stored.array.tobytes(), clip_starts)


def _exact_flac(audio: ReferenceAudio) -> bytes | None:
    """Return a FLAC file that decodes to the same samples, None if there is none."""
    for bits in _GRIDS:
        numbers = _on_grid(audio.samples, bits)
        if numbers is None:
            continue
        file, subtype = io.BytesIO(), f"PCM_{bits}"
        try:
            soundfile.write(file, numbers, audio.sample_rate_hz, subtype, format="FLAC")
            # Believed when seen: this is the only copy of somebody's voice.
            again = _decoded(file.getvalue(), audio.clip_starts)
        except (soundfile.SoundFileError, InvalidAudioError, OverflowError, ValueError):
            return None  # a rate that FLAC does not have
        return file.getvalue() if again.audio_sha256 == audio.audio_sha256 else None
    return None


def _on_grid(samples: npt.NDArray[np.float32], bits: int) -> npt.NDArray[Any] | None:
    """Return the whole numbers that the samples are, None if one is between two."""
    full_scale = 2.0 ** (bits - 1)
    scaled = samples.astype(np.float64) * full_scale
    if scaled.min() < -full_scale or scaled.max() > full_scale - 1:
        return None
    if not np.array_equal(scaled, np.rint(scaled)):
        return None
    kind, shift = _GRIDS[bits]
    return scaled.astype(kind) << shift


def _decoded(data: bytes, clip_starts: Sequence[int]) -> ReferenceAudio:
    mono, _, sample_rate_hz = downmix(read_blocks(data), _NO_LIMITS)
    return ReferenceAudio.of(mono, sample_rate_hz, clip_starts)
