"""Whether an encoding is a function of its clip, whatever was encoded before."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from benchmarks.gpu_check.clips import noise
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.families.networks import slices
from vllm_tts_cache.store.encoding import Encoding

Encode = Callable[[ReferenceAudio], Encoding]
# Scripts and libraries change their kernels at the second or third call, some of them
# for each length anew.
_NUM_TIMES = 3


def same_after_others(encode: Encode, seconds: float) -> dict[str, bool]:
    """Compare a clip's first encoding with later ones. Call it before all else.

    Returns: What was compared -> whether each bit is equal.
    """
    clip = noise(seconds)
    first = bits(encode(clip))
    again = [bits(encode(clip)) for _ in range(_NUM_TIMES)]
    after: list[dict[str, bytes]] = []
    for number, share in enumerate((0.4, 1.7, 0.9), start=1):
        other = noise(seconds * share, seed=number)
        for _ in range(_NUM_TIMES):
            encode(other)
        after.append(bits(encode(clip)))
    return {
        "again at once": all(found == first for found in again),
        "after clips of other lengths": all(found == first for found in after),
    }


def same_in_one_slice(encode: Encode, seconds: float) -> bool:
    """Whether the slices of time that a long clip is encoded in leave no trace."""
    clip = noise(seconds)
    in_slices = bits(encode(clip))
    with one_slice():
        return bits(encode(clip)) == in_slices


@contextmanager
def one_slice() -> Iterator[None]:
    """Encode whole clips at once inside."""
    with patch.object(slices, "slice_lengths", lambda length, _num: [length]):
        yield


def bits(encoding: Encoding) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in encoding.arrays.items()}
