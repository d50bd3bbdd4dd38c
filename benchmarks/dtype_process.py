"""Milliseconds of each reference encoder's network in float32 and in bfloat16.

``python -m benchmarks.dtype_process CHECKPOINT --rounds N`` prints JSON, encoder ->
dtype -> milliseconds of each round, in turns; a first round is dropped.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.precision_clips import synthetic_clip
from benchmarks.precision_networks import Network, network_of
from vllm_tts_cache.families.load import load_reference_encoders
from vllm_tts_cache.speaker.precision import exact_float32

DTYPES = (torch.float32, torch.bfloat16)
SECONDS = 3


def measure(checkpoint: Path, num_rounds: int) -> dict[str, dict[str, list[float]]]:
    """Time every encoder of the checkpoint, on one thread as in a server."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    # Each dtype has networks of its own: casting is done where they are.
    loaded = {dtype: load_reference_encoders(checkpoint, device) for dtype in DTYPES}
    return {
        name: _in_turns(
            {dtype: network_of(loaded[dtype][name]) for dtype in DTYPES}, num_rounds
        )
        for name in loaded[torch.float32]
    }


def _in_turns(
    networks: dict[torch.dtype, Network], num_rounds: int
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {_name(dtype): [] for dtype in DTYPES}
    for number in range(num_rounds + 1):
        for dtype in DTYPES if number % 2 else DTYPES[::-1]:
            took = _run(networks[dtype], dtype)
            found[_name(dtype)] += [took] if number else []
    return found


def _run(network: Network, dtype: torch.dtype) -> float:
    network.module.to(dtype)
    input_ = network.prepare(synthetic_clip(SECONDS).audio)
    with exact_float32(input_.device):  # no TF32; what is cast stays cast
        began = time.perf_counter()
        network.values(input_.unsqueeze(0).to(dtype), len(input_))
        return 1e3 * (time.perf_counter() - began)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--rounds", type=int, required=True)
    given = parser.parse_args(arguments)
    print(json.dumps(measure(given.checkpoint, given.rounds)))


if __name__ == "__main__":
    main()
