"""Prepares a clip for its encode as the official package does.

Silence is shortened as pydub does it: on 16-bit samples, in whole milliseconds, with
loudness as an integer. Each of these changes the result.

Sources: ``create_voice_clone_prompt`` of omnivoice 0.2.1, with a transcript, and its
``remove_silence``, over pydub 0.25.1.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.families.networks.sinc_resample import resample_by_function

# Raise it with any change here that changes what comes out.
REVISION = 1
# RMS to which a quieter clip is raised; speech from it is made as quiet again.
LOUDNESS = 0.1

RATE_HZ = 24_000
# Of a longer silence within a clip, at most so much is kept on each of its sides.
LONGEST_MS = 200
# How much silence is kept before and after a clip.
LEADING_MS = 100
TRAILING_MS = 200
# What is as loud as this, or quieter, is silence.
SILENCE_DB = -50
# Steps of the search for silence, within a clip and at its ends.
STEP_MS = 10
EDGE_STEP_MS = 10

_SAMPLES_PER_MS = RATE_HZ // 1000
_FULL_SCALE = 32768.0

Samples = npt.NDArray[np.float32]
Pcm = npt.NDArray[np.int16]
Span = tuple[int, int]  # milliseconds


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PreparedClip:
    """A clip as it is encoded.

    Attributes:
        samples: ``(num_samples,)`` at 24 kHz, whole frames.
        rms: Root mean square of the clip before it was made louder; a float32.
    """

    samples: Samples
    rms: np.float32


def prepare(audio: ReferenceAudio, samples_per_frame: int) -> PreparedClip:
    """Make a clip loud enough, shorten its silence and cut it to whole frames.

    Returns: A clip without samples, if it is all silence or too short for a frame.
    """
    # With an axis of channels: numpy's order of summing depends on the shape.
    channel = resample_by_function(audio, RATE_HZ)[np.newaxis]
    rms = np.sqrt(np.mean(channel**2))
    if 0 < rms < LOUDNESS:
        channel = channel * LOUDNESS / float(rms)
    samples = remove_silence(channel[0])
    num_whole = samples.size - samples.size % samples_per_frame
    return PreparedClip(samples=samples[:num_whole], rms=rms)


def settings() -> dict[str, Any]:
    """Return all settings that change a prepared clip, for the fingerprint."""
    return {
        "name": "omnivoice 0.2.1",
        "revision": REVISION,
        "loudness": LOUDNESS,
        "silence_db": SILENCE_DB,
        "longest_ms": LONGEST_MS,
        "leading_ms": LEADING_MS,
        "trailing_ms": TRAILING_MS,
        "step_ms": STEP_MS,
        "edge_step_ms": EDGE_STEP_MS,
    }


def remove_silence(samples: Samples) -> Samples:
    """Shorten what is silent in ``(num_samples,)`` at 24 kHz.

    Returns: Samples of 16-bit precision, in whole milliseconds; none if all is silence.
    """
    scaled = (samples * _FULL_SCALE).clip(-_FULL_SCALE, _FULL_SCALE - 1)
    # Whole milliseconds, with zeros for missing samples.
    num_samples = _SAMPLES_PER_MS * round(1000 * (scaled.size / RATE_HZ))
    pcm = scaled.astype(np.int16)[:num_samples]
    pcm = np.pad(pcm, (0, num_samples - pcm.size))
    kept = [_cut(pcm, span) for span in spans_to_keep(pcm)]
    pcm = np.concatenate(kept) if kept else pcm[:0]
    pcm = pcm[_excess(pcm, LEADING_MS) :]
    pcm = pcm[: pcm.size - _excess(pcm[::-1], TRAILING_MS)]
    return pcm.astype(np.float32) / _FULL_SCALE


def spans_to_keep(pcm: Pcm) -> list[Span]:
    """Return what is kept of a clip: speech, and some of the silence beside it."""
    length_ms = pcm.size // _SAMPLES_PER_MS
    wide = [[start - LONGEST_MS, end + LONGEST_MS] for start, end in _loud_spans(pcm)]
    for one, other in pairwise(wide):
        if other[0] < one[1]:
            one[1] = other[0] = (one[1] + other[0]) // 2
    return [(max(start, 0), min(end, length_ms)) for start, end in wide]


def _loud_spans(pcm: Pcm) -> list[Span]:
    length_ms = pcm.size // _SAMPLES_PER_MS
    silent = _silent_spans(pcm)
    if silent == [(0, length_ms)]:
        return []
    ends = [0, *(end for _, end in silent)]
    starts = [*(start for start, _ in silent), length_ms]
    loud = list(zip(ends, starts, strict=True))
    if silent and silent[-1][1] == length_ms:
        loud.pop()
    return loud[1:] if loud[0] == (0, 0) else loud


def _silent_spans(pcm: Pcm) -> list[Span]:
    """Return where the loudness over `LONGEST_MS` is that of silence."""
    last = pcm.size // _SAMPLES_PER_MS - LONGEST_MS
    if last < 0:
        return []
    starts = np.array([*range(0, last + 1, STEP_MS)])
    if last % STEP_MS:
        starts = np.append(starts, last)
    found = starts[_is_silent(_energy(pcm, starts, LONGEST_MS), LONGEST_MS)]
    if not found.size:
        return []
    # A silence that begins before the end of the last one extends it.
    gaps = np.flatnonzero(np.diff(found) > LONGEST_MS)
    begins = found[[0, *(gaps + 1)]]
    ends = found[[*gaps, -1]] + LONGEST_MS
    return [(int(a), int(b)) for a, b in zip(begins, ends, strict=True)]


def _excess(pcm: Pcm, kept_ms: int) -> int:
    """Return how many samples the silence at the beginning exceeds ``kept_ms`` by."""
    length_ms = pcm.size // _SAMPLES_PER_MS
    silent_ms = 0
    while silent_ms < length_ms:
        piece = _cut(pcm, (silent_ms, min(silent_ms + EDGE_STEP_MS, length_ms)))
        energy = np.array([np.sum(piece.astype(np.int64) ** 2)])
        if not _is_silent(energy, piece.size / _SAMPLES_PER_MS).all():
            break
        silent_ms += EDGE_STEP_MS
    return _SAMPLES_PER_MS * max(0, min(silent_ms, length_ms) - kept_ms)


def _energy(
    pcm: Pcm, starts_ms: npt.NDArray[np.int64], length_ms: int
) -> npt.NDArray[np.int64]:
    squares = np.cumsum(np.append(0, pcm.astype(np.int64) ** 2))
    starts = starts_ms * _SAMPLES_PER_MS
    return squares[starts + length_ms * _SAMPLES_PER_MS] - squares[starts]


def _is_silent(
    energy: npt.NDArray[np.int64], length_ms: float
) -> npt.NDArray[np.bool_]:
    # Loudness is the root mean square, rounded down.
    loudness = np.floor(np.sqrt(energy / (length_ms * _SAMPLES_PER_MS)))
    return loudness <= 10 ** (SILENCE_DB / 20) * _FULL_SCALE


def _cut(pcm: Pcm, span: Span) -> Pcm:
    start, end = span
    return pcm[start * _SAMPLES_PER_MS : end * _SAMPLES_PER_MS]
