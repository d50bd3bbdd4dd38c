"""New references arrive while streams run: how long the streams are held up."""

import time
from collections import defaultdict

from benchmarks.bench import Bench
from benchmarks.clips import clip
from benchmarks.rows import RatioAtMost, Row, Summary, percentile
from benchmarks.sides import Side
from benchmarks.streams import RunningStreams
from vllm_tts_cache.testing.client import data_url

NAME = "cold_bystander"
QUICK_COLD_SECONDS = 6
NUM_STREAMS = 3
STREAM_SENTENCES = 40
BETWEEN_SECONDS = 0.3

Samples = dict[str, list[float]]


def run(bench: Bench) -> list[Row]:
    bench.step(f"{NAME}: warming up")
    bench.sides.both(lambda side: _warm_up(bench, side))
    samples: Samples = defaultdict(list)
    for number, side in bench.sides.in_turns(bench.num_rounds):
        bench.step(f"{NAME}: round {number + 1}, {side.name}")
        samples[f"{side.name} alone"].append(_speak_cold(bench, side))
        _round(bench, side, samples)
    return _rows(samples)


def _round(bench: Bench, side: Side, samples: Samples) -> None:
    def body(stream: int) -> dict[str, object]:
        text = bench.text(STREAM_SENTENCES)
        return {"input": text, "voice": f"bystander-{stream}"}

    num_cold = bench.pick(full=2, quick=1)
    bodies = [lambda stream=stream: body(stream) for stream in range(NUM_STREAMS)]
    with RunningStreams(side, bodies) as streams:
        quiet_began = time.perf_counter()
        time.sleep(bench.pick(full=6.0, quick=2.5))
        cold_began = time.perf_counter()
        for _ in range(num_cold):
            samples[f"{side.name} beside"].append(_speak_cold(bench, side))
            time.sleep(BETWEEN_SECONDS)
        ended = time.perf_counter()
    _keep(samples, f"{side.name} quiet", streams.gaps_ms(quiet_began, cold_began))
    _keep(samples, f"{side.name} cold", streams.gaps_ms(cold_began, ended))


def _keep(samples: Samples, what: str, gaps_ms: list[float]) -> None:
    samples[f"{what} p50"].append(percentile(gaps_ms, 50))
    samples[f"{what} p99"].append(percentile(gaps_ms, 99))
    samples[f"{what} max"].append(max(gaps_ms))


def _speak_cold(bench: Bench, side: Side) -> float:
    """Seconds of one request whose reference nobody has seen."""
    seconds = bench.pick(full=bench.model.cold_seconds, quick=QUICK_COLD_SECONDS)
    reference = data_url(clip(seconds, bench.number()))
    began = time.perf_counter()
    side.speak(bench.short_text(), ref_audio=reference, **bench.model.inline)
    return time.perf_counter() - began


def _warm_up(bench: Bench, side: Side) -> None:
    for stream in range(NUM_STREAMS):
        name = f"bystander-{stream}"
        fields = bench.model.modes[bench.model.cheapest_mode]
        side.register(name, clip(3, bench.number()), **fields)
        side.precompute(name)
        side.speak(bench.short_text(), voice=name)
    _speak_cold(bench, side)  # a server's first encode is slower


def _rows(samples: Samples) -> list[Row]:
    def of(what: str) -> Summary:
        return Summary.of(samples[what])

    rows = []
    for state in ("quiet", "cold"):
        for measure in ("p50", "p99", "max"):
            rows.append(
                Row(
                    scenario=NAME,
                    what=f"gap between chunks, {state}, {measure}",
                    unit="ms",
                    ours=of(f"ours {state} {measure}"),
                    reference=of(f"stock {state} {measure}"),
                )
            )
    rows.append(
        Row(
            scenario=NAME,
            what="gap between chunks, p99, cold against quiet",
            unit="ms",
            ours=of("ours cold p99"),
            reference=of("ours quiet p99"),
            versus="ours, quiet",
            target=RatioAtMost(1.5),
        )
    )
    rows.append(
        Row(
            scenario=NAME,
            what="the cold request, alone",
            unit="s",
            ours=of("ours alone"),
            reference=of("stock alone"),
            target=RatioAtMost(1.1),
            note="both in float32",
        )
    )
    rows.append(
        Row(
            scenario=NAME,
            what=f"the cold request, beside {NUM_STREAMS} streams",
            unit="s",
            ours=of("ours beside"),
            reference=of("stock beside"),
        )
    )
    rows.append(
        Row(
            scenario=NAME,
            what="the cold request, ours beside streams against ours alone",
            unit="s",
            ours=of("ours beside"),
            reference=of("ours alone"),
            versus="ours, alone",
            note="the price of politeness",
        )
    )
    return rows
