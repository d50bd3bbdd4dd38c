"""Eight requests at once for references that nobody has encoded yet."""

import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from benchmarks.bench import Bench, clip
from benchmarks.measure import AtMost, RatioAtMost, Row, Summary
from benchmarks.sides import Side

NAME = "concurrent_cold"
NUM_REQUESTS = 8

Samples = dict[str, list[float]]


def run(bench: Bench) -> list[Row]:
    """8 for one clip; in a full run also 8 for 8 clips."""
    rows = []
    for num_clips in bench.pick(full=(1, NUM_REQUESTS), quick=(1,)):
        rows += _measure(bench, num_clips)
    return rows


def _measure(bench: Bench, num_clips: int) -> list[Row]:
    all_done: Samples = defaultdict(list)
    first_audio: Samples = defaultdict(list)
    num_encodes: list[float] = []
    whose = "1 clip" if num_clips == 1 else f"{num_clips} clips"
    bench.step(f"{NAME}: warming up")
    for side in bench.sides:
        _round(bench, side, num_clips)
    for number, side in bench.sides.in_turns(bench.num_rounds):
        bench.step(f"{NAME}: {whose}, round {number + 1}, {side.name}")
        before = side.encodes()
        seconds, ttfas = _round(bench, side, num_clips)
        all_done[side.name].append(seconds)
        first_audio[side.name] += ttfas
        if side.is_ours:
            after = side.encodes()
            used = [after[name] - before[name] for name in after]
            num_encodes += [count for count in used if count]  # a mode needs not all
    return [
        _row(f"{whose}: the last of {NUM_REQUESTS} answers is complete", all_done),
        _row(f"{whose}: first audio of each", first_audio),
        Row(
            f"{whose}: encodes of each encoder",
            "encodes",
            Summary.of([max(num_encodes)]),
            target=AtMost(num_clips),
            note="the most in any round; stock does not count",
        ),
    ]


def _row(what: str, samples: Samples) -> Row:
    # For one number of answers, no slower is no less throughput.
    return Row(
        what,
        "s",
        Summary.of(samples["ours"]),
        Summary.of(samples["stock"]),
        target=RatioAtMost(1.0),
    )


def _round(bench: Bench, side: Side, num_clips: int) -> tuple[float, list[float]]:
    """Seconds until the last answer is complete, and to the first audio of each."""
    voices = [f"crowd-{bench.number()}" for _ in range(num_clips)]
    for voice in voices:
        sample = clip(bench.pick(full=10, quick=3), bench.number())
        side.register(voice, sample, **bench.model.modes[bench.fullest_mode])
    ready = Barrier(NUM_REQUESTS + 1)

    def speak(number: int, text: str) -> float:
        ready.wait()
        return side.speak(text, voice=voices[number % num_clips]).ttfa_seconds

    texts = [bench.short_text() for _ in range(NUM_REQUESTS)]
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = [pool.submit(speak, *given) for given in enumerate(texts)]
        ready.wait()
        began = time.perf_counter()
        ttfas = [answer.result() for answer in answers]
        return time.perf_counter() - began, ttfas
