"""A clone in context in the codec decoder: the host's way, ours, and an x-vector's.

    python -m benchmarks.decoder_prefix [--rounds 5] [--threads 2] [--bfloat16]

In this process, with the host's decoder of the released size and random weights, in
turns. The first chunk has one frame, as shipped, and 72 of a reference before it.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from benchmarks import machine
from tests.families.qwen3_tts.decoders import (
    CHUNK,
    RELEASED,
    WINDOW,
    codes_of,
    decoded,
    decoder_of,
)
from vllm_tts_cache.families.qwen3_tts.decoder_prefix import DecoderPrefixes, State
from vllm_tts_cache.model_executor.decoder_states import DecoderStates

VOICE = "a" * 64
THREE_SECONDS = 38  # frames
STOCK, MISS, HIT, X_VECTOR = "stock", "ours, made", "ours, kept", "x-vector"


class Requests:
    """Begins requests in each of the ways, and speaks three seconds with them."""

    def __init__(self, dtype: torch.dtype):
        # A decoder that ours has touched computes all else as the host's does.
        self._decoder = decoder_of(RELEASED).to(dtype)
        self.states = DecoderStates(max_bytes=1 << 30)
        self._prefixes = DecoderPrefixes(self._decoder, self.states)
        self._reference = codes_of(WINDOW, 1, 2048)
        self._codes = codes_of(THREE_SECONDS, 2, 2048)
        self.first: dict[str, Callable[[], tuple[Tensor, State]]] = {
            STOCK: self._stock,
            MISS: lambda: self._ours(None),
            HIT: lambda: self._ours(VOICE),
            X_VECTOR: lambda: self._begin({"prefix_frames": 0}, self._codes[:, :1]),
        }
        self._ours(VOICE)

    def speak(self, how: str) -> tuple[float, float, Tensor]:
        """Seconds until the first chunk and until the end, and the samples."""
        began = time.perf_counter()
        samples, state = self.first[how]()
        first = time.perf_counter() - began
        chunks = [samples]
        for begin in range(1, THREE_SECONDS, CHUNK):
            codes = self._codes[:, begin : begin + CHUNK]
            chunks.append(decoded(self._decoder, codes, state))
        return first, time.perf_counter() - began, torch.cat(chunks)

    def _stock(self) -> tuple[Tensor, State]:
        begun = torch.cat([self._reference, self._codes[:, :1]], dim=1)
        return self._begin({"prefix_frames": WINDOW}, begun)

    def _ours(self, voice: str | None) -> tuple[Tensor, State]:
        state = self._prefixes.begin(self._reference, voice)
        return self._begin(state, self._codes[:, :1])

    def _begin(self, state: State, codes: Tensor) -> tuple[Tensor, State]:
        return decoded(self._decoder, codes, state), state


def main() -> None:
    """Measure, and print a table."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--bfloat16", action="store_true")
    given = arguments.parse_args()
    torch.set_num_threads(given.threads)
    requests = Requests(torch.bfloat16 if given.bfloat16 else torch.float32)
    print(f"{machine.describe()}, {machine.revision()[0]}, {given}", flush=True)
    seen: dict[str, list[tuple[float, float]]] = {how: [] for how in requests.first}
    heard: dict[str, Tensor] = {}
    for number in range(given.rounds):
        for how in list(seen)[:: 1 if number % 2 == 0 else -1]:
            first, whole, heard[how] = requests.speak(how)
            seen[how].append((first, whole))
            print(f"  {number} {how}: {first:.2f} {whole:.2f} s", flush=True)
    _tell(seen, heard, requests.states.stats()["bytes"])


def _tell(
    seen: dict[str, list[tuple[float, float]]], heard: dict[str, Tensor], num_bytes: int
) -> None:
    times = {
        how: tuple(median(column) for column in zip(*rows, strict=True))
        for how, rows in seen.items()
    }
    print("| | first chunk | against x-vector | 3 s of speech | against stock |")
    print("| --- | --- | --- | --- | --- |")
    for how, (first, whole) in times.items():
        against = first / times[X_VECTOR][0], whole / times[STOCK][1]
        print(
            f"| {how} | {1e3 * first:.0f} ms | {against[0]:.2f}x | {whole:.2f} s |"
            f" {against[1]:.2f}x |"
        )
    differs = (heard[HIT].float() - heard[STOCK].float()).abs().max()
    print(f"largest difference of a sample: {differs:.1e}, of {heard[STOCK].std():.2f}")
    print(f"a hit is a miss to the bit: {torch.equal(heard[HIT], heard[MISS])}")
    print(f"{num_bytes / 2**20:.2f} MiB for a voice")


if __name__ == "__main__":
    main()
