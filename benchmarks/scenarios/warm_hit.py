"""A request for a voice that is known: what the API process still does for it."""

import random
from statistics import median

from benchmarks.bench import Bench, clip
from benchmarks.measure import AtMost, Point, Row, Summary
from benchmarks.sides import Side

NUM_WARM_UPS = 2
NAME = "warm_hit"
LIMIT = "limit"
STALL_MAX_MS = 1.0

Sights = list[dict[str, float]]
Seen = dict[tuple[str, object], Sights]


def run(bench: Bench) -> list[Row]:
    """Clones with references of several lengths, and the limit.

    The limit is a request that costs the speaker side nothing, such as one that
    brings a raw speaker embedding, or none and no voice either: what the host does
    for every request.
    """
    lengths = bench.pick(full=(3, 10, 30), quick=(3, 30))
    fields: dict[object, dict[str, object]] = {
        seconds: {"voice": _voice(seconds)} for seconds in lengths
    }
    fields[LIMIT] = bench.model.limit(bench.model.checkpoint(bench.work))
    bench.step(f"{NAME}: warming up")
    bench.sides.both(lambda side: _warm_up(bench, side, lengths))
    seen: Seen = {}
    for number, side in bench.sides.in_turns(bench.num_rounds):
        bench.step(f"{NAME}: round {number + 1}, {side.name}")
        # In turns, as a busy machine adds to all that it serves for some seconds; and
        # in any order, as a request that follows one of its own kind costs less.
        order = random.Random(number)
        for _ in range(bench.pick(full=30, quick=2)):
            for what in order.sample(list(fields), len(fields)):
                sight = side.look_inside(bench.short_text(), **fields[what])
                seen.setdefault((side.name, what), []).append(sight)
    return _rows(bench, seen, lengths)


def _warm_up(bench: Bench, side: Side, lengths: tuple[int, ...]) -> None:
    for seconds in lengths:
        name = _voice(seconds)
        # 30 s is the limit, and a rounding above it is refused.
        sample = clip(seconds - 0.01, bench.number())
        side.register(name, sample, **bench.model.modes[bench.fullest_mode])
        side.precompute(name)
        for _ in range(NUM_WARM_UPS):
            side.speak(bench.short_text(), voice=name)


def _rows(bench: Bench, seen: Seen, lengths: tuple[int, ...]) -> list[Row]:
    fields = (
        ("prepare_ms", "time before the engine is called", "ms", None),
        ("cpu_ms", "CPU time before the engine is called", "ms", None),
        ("stall_ms", "longest stall of the event loop", "ms", None),
        (
            "engine_bytes",
            "message to the engine",
            "bytes",
            AtMost(bench.model.message_max_bytes),
        ),
    )
    rows = []
    for what in (*lengths, LIMIT):
        is_limit = what == LIMIT
        whose = "the limit" if is_limit else f"{what} s reference"
        for field, title, unit, target in fields:
            rows.append(
                Row(
                    f"{title}, {whose}",
                    unit,
                    _of(seen, "ours", what, field),
                    _of(seen, "stock", what, field),
                    target=None if is_limit else target,
                    point=_point(bench, field, what),
                )
            )
        if not is_limit:
            cpu_max_ms = bench.model.speaker_cpu_max_ms
            rows += [
                _above_limit(seen, what, "cpu_ms", "CPU time", cpu_max_ms),
                _above_limit(seen, what, "stall_ms", "stall", STALL_MAX_MS),
            ]
    return rows


def _point(bench: Bench, field: str, seconds: object) -> Point | None:
    if not isinstance(seconds, int) or field not in ("cpu_ms", "engine_bytes"):
        return None
    return Point("cost", f"{bench.model.name} {field}", seconds)


def _above_limit(
    seen: Seen, seconds: object, field: str, title: str, max_ms: float
) -> Row:
    """What the speaker adds: the host's own part is in both."""

    def above(side: str) -> Summary:
        limit = median(sight[field] for sight in seen[side, LIMIT])
        return Summary.of([sight[field] - limit for sight in seen[side, seconds]])

    return Row(
        f"{title} above the limit's, {seconds} s reference",
        "ms",
        above("ours"),
        above("stock"),
        target=AtMost(max_ms),
    )


def _of(seen: Seen, side: str, what: object, field: str) -> Summary:
    return Summary.of([sight[field] for sight in seen[side, what]])


def _voice(seconds: int) -> str:
    return f"warm-{seconds}"
