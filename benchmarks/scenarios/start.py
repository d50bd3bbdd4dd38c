"""What a start takes: the server's, and the reference encoders' part of ours."""

import time
from collections import defaultdict
from pathlib import Path

from benchmarks import fresh_process
from benchmarks.bench import Bench
from benchmarks.measure import RatioAtMost, Row, Summary, in_fresh_process
from vllm_tts_cache.speaker.weight_hashes import FILE_NAME

NAME = "start"
# Weights that were written just now are hashed at each start.
SETTLE_SECONDS = 10.0


def run(bench: Bench) -> list[Row]:
    took: dict[str, list[float]] = defaultdict(list)
    for number, side in bench.sides.in_turns(bench.num_rounds):
        bench.step(f"{NAME}: round {number + 1}, {side.name}")
        took[side.name].append(side.restart())
    whole = Row(
        "start until the server is healthy",
        "s",
        Summary.of(took["ours"]),
        Summary.of(took["stock"]),
        target=RatioAtMost(1.1),
        note="the other server is up beside it",
    )
    return [whole, *_encoder_rows(bench)]


def _encoder_rows(bench: Bench) -> list[Row]:
    bench.step(f"{NAME}: loading encoders")
    checkpoint = bench.model.checkpoint(bench.work)
    directory = bench.work / "start"
    time.sleep(SETTLE_SECONDS)
    _load(checkpoint, directory)  # the files are in the page cache from here on
    known, unknown = [], []
    for _ in range(3 * bench.num_rounds):
        known.append(_load(checkpoint, directory))
        (directory / FILE_NAME).unlink()
        unknown.append(_load(checkpoint, directory))
    return [
        Row(
            "loading the reference encoders, their weights hashed before",
            "s",
            Summary.of(known),
            Summary.of(unknown),
            versus="ours, hashed anew",
        )
    ]


def _load(checkpoint: Path, directory: Path) -> float:
    module = fresh_process.__name__
    return in_fresh_process(module, "encoders", checkpoint, directory)["seconds"]
