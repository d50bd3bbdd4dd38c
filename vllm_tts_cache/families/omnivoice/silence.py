"""Shortening the silence of a clip, as pydub does it for the official package.

On 16-bit samples and in whole milliseconds, whose loudness is an integer: what a clip
becomes hangs on each of these.

Source: ``remove_silence`` of omnivoice 0.2.1, over pydub 0.25.1.
"""

from itertools import pairwise

import numpy as np
import numpy.typing as npt

RATE_HZ = 24_000
# A silence within a clip that is longer is shortened, to so much on both its sides.
LONGEST_MS = 200
# What is kept of the silence before and behind.
LEADING_MS = 100
TRAILING_MS = 200
# As loud as this or quieter is silence.
SILENCE_DB = -50
# How finely it is looked for, within a clip and at its ends.
STEP_MS = 10
EDGE_STEP_MS = 10

_SAMPLES_PER_MS = RATE_HZ // 1000
_FULL_SCALE = 32768.0

Pcm = npt.NDArray[np.int16]
Span = tuple[int, int]  # milliseconds


def remove_silence(samples: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Shorten what is silent in a clip.

    Args:
        samples: ``(num_samples,)`` at 24 kHz.

    Returns:
        Fewer samples, or as many, of 16 bits; none if all is silence.
    """
    scaled = (samples * _FULL_SCALE).clip(-_FULL_SCALE, _FULL_SCALE - 1)
    pcm = _in_whole_ms(scaled.astype(np.int16))
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
    # One that begins before the last one's end goes on with it.
    gaps = np.flatnonzero(np.diff(found) > LONGEST_MS)
    begins = found[[0, *(gaps + 1)]]
    ends = found[[*gaps, -1]] + LONGEST_MS
    return [(int(a), int(b)) for a, b in zip(begins, ends, strict=True)]


def _excess(pcm: Pcm, kept_ms: int) -> int:
    """How many samples of the silence at the beginning are too many."""
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
    # Loudness is the root mean square, without what is behind its point.
    loudness = np.floor(np.sqrt(energy / (length_ms * _SAMPLES_PER_MS)))
    return loudness <= 10 ** (SILENCE_DB / 20) * _FULL_SCALE


def _in_whole_ms(pcm: Pcm) -> Pcm:
    """Round a clip's length; what is missing of the last millisecond is zero."""
    num_samples = _SAMPLES_PER_MS * round(1000 * (pcm.size / RATE_HZ))
    return np.pad(pcm[:num_samples], (0, max(0, num_samples - pcm.size)))


def _cut(pcm: Pcm, span: Span) -> Pcm:
    start, end = span
    return pcm[start * _SAMPLES_PER_MS : end * _SAMPLES_PER_MS]
