"""Eight requests at once for one voice that nobody has encoded yet."""

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from benchmarks.bench import Bench
from benchmarks.clips import TRANSCRIPT, clip
from benchmarks.rows import AtMost, RatioAtMost, Row, Summary
from benchmarks.sides import Side

NAME = "concurrent_cold"
NUM_REQUESTS = 8
CLIP_SECONDS = 10


def run(bench: Bench) -> list[Row]:
    all_done: dict[str, list[float]] = {"stock": [], "ours": []}
    first_audio: dict[str, list[float]] = {"stock": [], "ours": []}
    num_encodes: list[float] = []
    bench.step(f"{NAME}: warming up")
    for side in bench.sides:
        _round(bench, side)
    for number, side in bench.sides.in_turns(bench.num_rounds):
        bench.step(f"{NAME}: round {number + 1}, {side.name}")
        before = side.client.encodes() if side.is_ours else {}
        seconds, ttfas = _round(bench, side)
        all_done[side.name].append(seconds)
        first_audio[side.name] += ttfas
        if side.is_ours:
            after = side.client.encodes()
            num_encodes += [after[name] - before[name] for name in after]
    return [
        _row("the last of 8 answers is complete", all_done, RatioAtMost(1.0)),
        _row("first audio of each", first_audio, RatioAtMost(1.0)),
        Row(
            scenario=NAME,
            what="encodes of each encoder",
            unit="encodes",
            ours=Summary.of(num_encodes),
            target=AtMost(1),
            note="stock does not count",
        ),
    ]


def _row(what: str, samples: dict[str, list[float]], target: RatioAtMost) -> Row:
    return Row(
        scenario=NAME,
        what=what,
        unit="s",
        ours=Summary.of(samples["ours"]),
        reference=Summary.of(samples["stock"]),
        target=target,
    )


def _round(bench: Bench, side: Side) -> tuple[float, list[float]]:
    """Seconds until the last answer is complete, and to the first audio of each."""
    voice = f"crowd-{bench.number()}"
    side.register(voice, clip(CLIP_SECONDS, bench.number()), ref_text=TRANSCRIPT)
    ready = Barrier(NUM_REQUESTS + 1)

    def speak(text: str) -> float:
        ready.wait()
        return side.speak(text, voice=voice).ttfa_seconds

    texts = [bench.short_text() for _ in range(NUM_REQUESTS)]
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = [pool.submit(speak, text) for text in texts]
        ready.wait()
        began = time.perf_counter()
        ttfas = [answer.result() for answer in answers]
        return time.perf_counter() - began, ttfas
