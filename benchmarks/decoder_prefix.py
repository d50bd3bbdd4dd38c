"""A clone in context in the codec decoder: the host's way, ours, and an x-vector's.

    python -m benchmarks.decoder_prefix [--rounds 5] [--threads 2] [--bfloat16]
        [--cpu-time]

In this process, with the host's decoder of the released size and random weights, in
turns; writes a JSON file. The first chunk has one frame, as shipped, and 72 of a
reference before it. ``--cpu-time`` is for a machine that others use, with one thread.
With ``--small`` a decoder that says nothing about times.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import alone
from benchmarks.measure import Row, Summary
from tests.families.qwen3_tts.decoders import (
    CHUNK,
    RELEASED,
    SMALL,
    WINDOW,
    codes_of,
    decoded,
    decoder_of,
)
from vllm_tts_cache.families.qwen3_tts.decoder_prefix import DecoderPrefixes, State
from vllm_tts_cache.model_executor.decoder_states import DecoderStates

VOICE = "a" * 64
THREE_SECONDS = 38  # frames
NUM_TOGETHER = 4
STOCK, MISS, HIT, X_VECTOR = "stock", "ours, made", "ours, kept", "x-vector"
_SCENARIO: dict[str, Any] = {"scenario": "decoder_prefix", "model": "qwen3-tts"}


class Requests:
    """Begins requests in each of the ways, and speaks three seconds with them."""

    def __init__(
        self,
        sizes: dict[str, Any],
        dtype: torch.dtype,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._clock = clock
        # A decoder that ours has touched computes all else as the host's does.
        self._decoder = decoder_of(sizes).to(dtype)
        self.states = DecoderStates(max_bytes=1 << 30)
        self._prefixes = DecoderPrefixes(self._decoder, self.states)
        num_codes = self._decoder.config.codebook_size
        self._reference = codes_of(WINDOW, 1, num_codes)
        self._codes = codes_of(THREE_SECONDS, 2, num_codes)
        self._begun = torch.cat([self._reference, self._codes[:, :1]], dim=1)
        self.states_of: dict[str, Callable[[], State]] = {
            STOCK: lambda: {"prefix_frames": WINDOW},
            MISS: lambda: self._ours(None),
            HIT: lambda: self._ours(VOICE),
            X_VECTOR: lambda: {"prefix_frames": 0},
        }
        self._ours(VOICE)

    def speak(self, how: str) -> tuple[float, float, Tensor]:
        """Seconds until the first chunk and until the end, and the samples."""
        began = self._clock()
        state = self.states_of[how]()
        chunks = [decoded(self._decoder, self._first(how), state)]
        first = self._clock() - began
        for begin in range(1, THREE_SECONDS, CHUNK):
            codes = self._codes[:, begin : begin + CHUNK]
            chunks.append(decoded(self._decoder, codes, state))
        return first, self._clock() - began, torch.cat(chunks)

    def begin_together(self, how: str) -> float:
        """Seconds until the first chunks of several requests of one step."""
        began = self._clock()
        states = [self.states_of[how]() for _ in range(NUM_TOGETHER)]
        codes = self._first(how).expand(NUM_TOGETHER, -1, -1)
        lengths = [codes.shape[-1]] * NUM_TOGETHER
        self._decoder.batched_chunked_decode(codes, lengths, caches=states)
        return self._clock() - began

    def _first(self, how: str) -> Tensor:
        return self._begun if how == STOCK else self._codes[:, :1]

    def _ours(self, voice: str | None) -> State:
        state = self._prefixes.begin(self._reference, voice)
        assert state is not None, "there is no memory for it"
        return state


def main(arguments: Sequence[str]) -> None:
    """Measure, print a table and write it."""
    parser = alone.parser(__doc__, num_rounds=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true")
    given = parser.parse_args(arguments)
    alone.run(
        given,
        _measured,
        num_threads=given.threads,
        clock="CPU time" if given.cpu_time else "wall",
    )


def _measured(given: argparse.Namespace) -> list[Row]:
    clock = time.process_time if given.cpu_time else time.perf_counter
    requests = Requests(
        SMALL if given.small else RELEASED, alone.dtype_of(given), clock
    )
    seen: dict[str, list[tuple[float, ...]]] = {how: [] for how in requests.states_of}
    heard: dict[str, Tensor] = {}
    for number in range(given.rounds):
        for how in list(seen)[:: 1 if number % 2 == 0 else -1]:
            first, whole, heard[how] = requests.speak(how)
            seen[how].append((first, whole, requests.begin_together(how)))
            times = ", ".join(f"{seconds:.2f}" for seconds in seen[how][-1])
            print(f"  {number} {how}: {times} s", file=sys.stderr, flush=True)
    return [*_times(seen), *_samples(heard, requests.states.stats(0).bytes)]


def _times(seen: dict[str, list[tuple[float, ...]]]) -> list[Row]:
    """Each way beside an x-vector's first chunk, and beside stock's whole speech."""
    first, whole, together = (
        {how: Summary.of([row[column] for row in rows]) for how, rows in seen.items()}
        for column in range(3)
    )
    return [
        *_beside(first, "first chunk", X_VECTOR),
        *_beside(whole, "3 s of speech", STOCK),
        *_beside(together, f"first chunks of {NUM_TOGETHER} at once", X_VECTOR),
    ]


def _beside(times: dict[str, Summary], what: str, versus: str) -> list[Row]:
    return [
        Row(f"{what}, {how}", "s", ours, times[versus], versus=versus, **_SCENARIO)
        for how, ours in times.items()
    ]


def _samples(heard: dict[str, Tensor], num_bytes: int) -> list[Row]:
    differs = (heard[HIT].float() - heard[STOCK].float()).abs().max()
    num_other = (heard[HIT] != heard[MISS]).sum()
    figures = [
        ("largest difference of a sample from stock's", "", float(differs)),
        ("standard deviation of stock's samples", "", float(heard[STOCK].std())),
        ("samples of a hit that are not the miss's", "", float(num_other)),
        ("a voice's state", "MiB", num_bytes / 2**20),
    ]
    return [
        Row(what, unit, Summary.of([value]), **_SCENARIO)
        for what, unit, value in figures
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
