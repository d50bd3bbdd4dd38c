"""A request for a voice that is known: what the API process still does for it."""

import json
from statistics import median

from benchmarks.bench import Bench
from benchmarks.clips import TRANSCRIPT, clip
from benchmarks.rows import AtMost, Row, Summary
from benchmarks.sides import Side

SECONDS = (3, 10, 30)
NUM_WARM_UPS = 2
NAME = "warm_hit"

Sights = list[dict[str, float]]


def run(bench: Bench) -> list[Row]:
    """In-context clones with references of 3, 10 and 30 s, and the limit.

    The limit is a request that brings a raw speaker embedding: what the host does
    for every request, whoever speaks.
    """
    seen: dict[tuple[str, object], Sights] = {}
    fields: dict[object, dict[str, object]] = {
        s: {"voice": f"warm-{s}"} for s in SECONDS
    }
    fields["limit"] = {"speaker_embedding": _embedding(bench), "task_type": "Base"}
    bench.step(f"{NAME}: warming up")
    bench.sides.both(lambda side: _warm_up(bench, side))
    num_requests = 4 if bench.is_quick else 10
    for number, side in bench.sides.in_turns(bench.num_rounds):
        bench.step(f"{NAME}: round {number + 1}, {side.name}")
        for what, given in fields.items():
            sights = seen.setdefault((side.name, what), [])
            for _ in range(num_requests):
                sights.append(side.look_inside(bench.short_text(), **given))
    return _rows(seen)


def _warm_up(bench: Bench, side: Side) -> None:
    for seconds in SECONDS:
        name = f"warm-{seconds}"
        # 30 s is the limit, and a rounding above it is refused.
        side.register(name, clip(seconds - 0.01, bench.number()), ref_text=TRANSCRIPT)
        side.precompute(name)
        for _ in range(NUM_WARM_UPS):
            side.speak(bench.short_text(), voice=name)


def _rows(seen: dict[tuple[str, object], Sights]) -> list[Row]:
    def of(side: str, what: object, field: str) -> Summary:
        return Summary.of([sight[field] for sight in seen[side, what]])

    rows = []
    for seconds in SECONDS:
        for field, title, unit, target in _FIELDS:
            ours, stock = of("ours", seconds, field), of("stock", seconds, field)
            what = f"{title}, {seconds} s reference"
            rows.append(
                Row(
                    scenario=NAME,
                    what=what,
                    unit=unit,
                    ours=ours,
                    reference=stock,
                    target=target,
                )
            )
        rows.append(_share_of_speaker(seen, seconds))
    for field, title, unit, _ in _FIELDS:
        ours, stock = of("ours", "limit", field), of("stock", "limit", field)
        what = f"{title}, raw embedding (limit)"
        rows.append(
            Row(scenario=NAME, what=what, unit=unit, ours=ours, reference=stock)
        )
    return rows


def _share_of_speaker(seen: dict[tuple[str, object], Sights], seconds: int) -> Row:
    def above_limit(side: str) -> Summary:
        limit = median(sight["cpu_ms"] for sight in seen[side, "limit"])
        return Summary.of([s["cpu_ms"] - limit for s in seen[side, seconds]])

    return Row(
        scenario=NAME,
        what=f"CPU time above the limit's, {seconds} s reference",
        unit="ms",
        ours=above_limit("ours"),
        reference=above_limit("stock"),
        target=AtMost(0.5),
    )


def _embedding(bench: Bench) -> list[float]:
    config = json.loads((bench.work / "checkpoint" / "config.json").read_text())
    size = config["speaker_encoder_config"]["enc_dim"]
    return [0.02 * (i % 5 - 2) for i in range(size)]


_FIELDS = (
    ("prepare_ms", "time before the engine is called", "ms", None),
    ("cpu_ms", "CPU time before the engine is called", "ms", None),
    ("stall_ms", "longest stall of the event loop", "ms", AtMost(1.0)),
    ("engine_bytes", "message to the engine", "bytes", AtMost(4096)),
)
