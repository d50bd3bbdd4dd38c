"""Time to first audio of one stream: warm, first after an upload, after a restart."""

import time

from benchmarks.bench import Bench
from benchmarks.clips import TRANSCRIPT, clip
from benchmarks.rows import AtMost, RatioAtMost, Row, Summary
from benchmarks.sides import Side

NAME = "ttfa"
LENGTHS = (3, 30)
MODES = {"x-vector": {}, "in-context": {"ref_text": TRANSCRIPT}}
NUM_WARM_UPS = 2
FIRST_SECONDS = 10
READY_TIMEOUT_SECONDS = 60.0

Samples = dict[tuple[str, str, int], list[float]]


def run(bench: Bench) -> list[Row]:
    return [*_warm(bench), *_after_upload(bench), *_after_restart(bench)]


def _warm(bench: Bench) -> list[Row]:
    bench.step(f"{NAME}: warming up")
    bench.sides.both(lambda side: _warm_up(bench, side))
    samples: Samples = {}
    num_requests = 3 if bench.is_quick else 8
    for number, side in bench.sides.in_turns(bench.num_rounds):
        bench.step(f"{NAME}: warm, round {number + 1}, {side.name}")
        for _ in range(num_requests):
            for mode in MODES:
                for seconds in LENGTHS:
                    found = samples.setdefault((side.name, mode, seconds), [])
                    found.append(_ttfa_ms(bench, side, _voice(mode, seconds)))
    return _warm_rows(samples)


def _warm_up(bench: Bench, side: Side) -> None:
    for mode, fields in MODES.items():
        for seconds in LENGTHS:
            voice = _voice(mode, seconds)
            side.register(voice, clip(seconds - 0.01, bench.number()), **fields)
            side.precompute(voice)
            for _ in range(NUM_WARM_UPS):
                _ttfa_ms(bench, side, voice)


def _warm_rows(samples: Samples) -> list[Row]:
    rows = []
    for mode in MODES:
        for seconds in LENGTHS:
            ours = Summary.of(samples["ours", mode, seconds])
            stock = Summary.of(samples["stock", mode, seconds])
            # The reference's codes are part of an in-context prompt and of what the
            # codec decoder starts from: 30 s cost more there, on either side.
            target = RatioAtMost(1.0) if seconds == LENGTHS[0] else None
            what = f"warm, {mode}, {seconds} s reference"
            rows.append(
                Row(
                    scenario=NAME,
                    what=what,
                    unit="ms",
                    ours=ours,
                    reference=stock,
                    target=target,
                )
            )
    for mode in MODES:
        rows.append(
            Row(
                scenario=NAME,
                what=f"warm, {mode}, ours at 30 s",
                unit="ms",
                ours=Summary.of(samples["ours", mode, 30]),
                reference=Summary.of(samples["ours", mode, 3]),
                versus="ours at 3 s",
                target=RatioAtMost(1.05) if mode == "x-vector" else None,
            )
        )
    return rows


def _after_upload(bench: Bench) -> list[Row]:
    first: dict[str, list[float]] = {}
    warm: dict[str, list[float]] = {}
    num_encodes = []
    num_voices = 1 if bench.is_quick else 4
    for number, side in bench.sides.in_turns(bench.num_rounds):
        bench.step(f"{NAME}: after upload, round {number + 1}, {side.name}")
        for _ in range(num_voices):
            voice = _upload(bench, side)
            before = _total_encodes(side)
            first.setdefault(side.name, []).append(_ttfa_ms(bench, side, voice))
            warm.setdefault(side.name, []).append(_ttfa_ms(bench, side, voice))
            if side.is_ours:
                num_encodes.append(_total_encodes(side) - before)
    row = Row(
        scenario=NAME,
        what=f"first request after upload, in-context, {FIRST_SECONDS} s reference",
        unit="ms",
        ours=Summary.of(first["ours"]),
        reference=Summary.of(first["stock"]),
    )
    return [row, *_first_rows("after upload", first["ours"], warm["ours"], num_encodes)]


def _upload(bench: Bench, side: Side) -> str:
    """A new voice; on ours, when its background precompute has ended."""
    voice = f"first-{bench.number()}"
    sample = clip(FIRST_SECONDS, bench.number())
    side.register(voice, sample, ref_text=TRANSCRIPT, precompute="true")
    until = time.monotonic() + READY_TIMEOUT_SECONDS
    while side.is_ours and time.monotonic() < until:
        answer = side.client.http.get(f"/v1/audio/voices/{voice}/cache").json()
        if answer["cache_status"] == "ready":
            break
        time.sleep(0.02)
    return voice


def _after_restart(bench: Bench) -> list[Row]:
    side = bench.sides.ours
    bench.step(f"{NAME}: restarting ours")
    num_voices = bench.num_rounds * (1 if bench.is_quick else 4)
    voices = [_upload(bench, side) for _ in range(num_voices + NUM_WARM_UPS)]
    side.restart()
    # The server's own first requests are slow whoever speaks.
    for voice in voices[:NUM_WARM_UPS]:
        _ttfa_ms(bench, side, voice)
    bench.step(f"{NAME}: after restart")
    first, warm = [], []
    for voice in voices[NUM_WARM_UPS:]:
        first.append(_ttfa_ms(bench, side, voice))
        warm.append(_ttfa_ms(bench, side, voice))
    return _first_rows("after restart", first, warm, [_total_encodes(side)])


def _first_rows(
    when: str, first: list[float], warm: list[float], num_encodes: list[int]
) -> list[Row]:
    return [
        Row(
            scenario=NAME,
            what=f"first request {when}, against the voice's second",
            unit="ms",
            ours=Summary.of(first),
            reference=Summary.of(warm),
            versus="ours, second",
            target=RatioAtMost(1.05),
        ),
        Row(
            scenario=NAME,
            what=f"encodes in requests {when}",
            unit="encodes",
            ours=Summary.of([sum(num_encodes)]),
            target=AtMost(0),
        ),
    ]


def _total_encodes(side: Side) -> int:
    return sum(side.client.encodes().values()) if side.is_ours else 0


def _ttfa_ms(bench: Bench, side: Side, voice: str) -> float:
    return 1e3 * side.speak(bench.short_text(), voice=voice).ttfa_seconds


def _voice(mode: str, seconds: int) -> str:
    return f"ttfa-{mode}-{seconds}"
