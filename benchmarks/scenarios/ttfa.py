"""Time to first audio of a voice that is known, alone and among others."""

from concurrent.futures import ThreadPoolExecutor

from benchmarks.bench import Bench, clip
from benchmarks.measure import RatioAtMost, Row, Summary
from benchmarks.sides import Side

NAME = "ttfa"
LENGTHS = SHORT, LONG = (3, 30)
NUM_WARM_UPS = 2
MAX_WORK_RATIO = 0.5
BYTES_PER_SECOND = 2 * 24_000  # of the audio of those whose decoder is timed

# (side, concurrency, mode, seconds of reference) -> ms
Samples = dict[tuple[str, int, str, int], list[float]]
Decodes = dict[tuple[str, int], list[float]]


def run(bench: Bench) -> list[Row]:
    bench.step(f"{NAME}: warming up")
    bench.sides.both(lambda side: _warm_up(bench, side))
    samples: Samples = {}
    concurrencies = bench.pick(full=(1, 4), quick=(1,))
    for number, side in bench.sides.in_turns(bench.num_rounds):
        for at_once in concurrencies:
            bench.step(f"{NAME}: {at_once} at once, round {number + 1}, {side.name}")
            _round(bench, side, at_once, samples)
    rows = []
    for at_once in concurrencies:
        rows += _against_stock(bench, samples, at_once)
        rows += _against_short(bench, samples, at_once)
        rows += _against_x_vector(bench, samples, at_once)
    return rows + _decoder_rows(bench) + _decoding_rows(bench)


def _warm_up(bench: Bench, side: Side) -> None:
    for mode in bench.modes:
        for seconds in LENGTHS:
            voice = _voice(mode, seconds)
            # 30 s is the limit, and a rounding above it is refused.
            sample = clip(seconds - 0.01, bench.number())
            side.register(voice, sample, **bench.model.modes[mode])
            side.precompute(voice)
            for _ in range(NUM_WARM_UPS):
                side.speak(bench.short_text(), voice=voice)


def _round(bench: Bench, side: Side, at_once: int, samples: Samples) -> None:
    num_requests = bench.pick(full=4, quick=2)
    with ThreadPoolExecutor(at_once) as pool:
        for _ in range(num_requests // at_once):
            for mode in bench.modes:
                for seconds in LENGTHS:
                    voice = _voice(mode, seconds)
                    texts = [bench.short_text() for _ in range(at_once)]
                    found = samples.setdefault((side.name, at_once, mode, seconds), [])
                    found += pool.map(
                        lambda text, voice=voice: ttfa_ms(side, text, voice), texts
                    )


def _against_stock(bench: Bench, samples: Samples, at_once: int) -> list[Row]:
    rows = []
    for mode in bench.modes:
        for seconds in LENGTHS:
            rows.append(
                Row(
                    f"warm, {at_once} at once, {mode}, {seconds} s reference",
                    "ms",
                    Summary.of(samples["ours", at_once, mode, seconds]),
                    Summary.of(samples["stock", at_once, mode, seconds]),
                    target=RatioAtMost(1.0) if seconds == SHORT else None,
                )
            )
    return rows


def _against_short(bench: Bench, samples: Samples, at_once: int) -> list[Row]:
    """Ours at 30 s against ours at 3 s.

    In an in-context clone the reference's codes are part of the prompt and of what
    the codec decoder starts from: there a longer one costs more, on either side.
    """
    return [
        Row(
            f"warm, {at_once} at once, {mode}, ours at {LONG} s",
            "ms",
            Summary.of(samples["ours", at_once, mode, LONG]),
            Summary.of(samples["ours", at_once, mode, SHORT]),
            versus=f"ours at {SHORT} s",
            target=RatioAtMost(1.05) if mode == "x-vector" else None,
        )
        for mode in bench.modes
    ]


def _against_x_vector(bench: Bench, samples: Samples, at_once: int) -> list[Row]:
    cheapest, *others = bench.modes
    return [
        Row(
            f"warm, {at_once} at once, ours {mode}, {seconds} s reference",
            "ms",
            Summary.of(samples["ours", at_once, mode, seconds]),
            Summary.of(samples["ours", at_once, cheapest, seconds]),
            versus=f"ours, {cheapest}",
            target=RatioAtMost(1.15),
        )
        for mode in others
        for seconds in LENGTHS
    ]


def _decoder_rows(bench: Bench) -> list[Row]:
    """What the reference's codes, as the codec decoder's prefix, cost there."""
    if len(bench.modes) < 2 or not bench.model.times_decoder:
        return []
    side, samples = bench.sides.ours, Decodes()
    bench.step(f"{NAME}: the decoder's first step")
    for _ in range(3 * bench.num_rounds):
        for mode in bench.modes:
            for seconds in LENGTHS:
                took = side.first_decode_ms(
                    bench.short_text(), voice=_voice(mode, seconds)
                )
                samples.setdefault((mode, seconds), []).append(took)
    plain, *others = bench.modes
    return [
        Row(
            f"codec decoder's first step, {mode}, {seconds} s reference",
            "ms",
            Summary.of(samples[mode, seconds]),
            Summary.of(samples[plain, seconds]),
            versus=f"ours, {plain}",
            note=f"part of the time to first audio; {_decoder_size(bench)}",
        )
        for mode in others
        for seconds in LENGTHS
    ]


def _decoder_size(bench: Bench) -> str:
    is_real = bench.model.options.get("real_decoder")
    return "a decoder of the released size" if is_real else "a tiny decoder"


def _decoding_rows(bench: Bench) -> list[Row]:
    """What a whole request costs the decoder: the same tokens on both sides."""
    if len(bench.modes) < 2 or not bench.model.times_decoder:
        return []
    took: dict[str, list[float]] = {}
    sizes = []
    mode = bench.fullest_mode
    for number, side in bench.sides.in_turns(2 * bench.num_rounds):
        bench.step(f"{NAME}: the decoder's work, {number + 1}, {side.name}")
        # Of a text that is spoken once the tokens depend on the seed alone.
        text = f"The keeper lights lamp {number}, and waits for the boats."
        ms, num_bytes = side.decoding(text, voice=_voice(mode, LONG))
        took.setdefault(side.name, []).append(ms)
        sizes.append(num_bytes)
    seconds = Summary.of(sizes).median / BYTES_PER_SECOND
    return [
        Row(
            f"codec decoder's work of one request, {mode}, {LONG} s reference",
            "ms",
            Summary.of(took["ours"]),
            Summary.of(took["stock"]),
            target=RatioAtMost(MAX_WORK_RATIO),
            note=f"the same tokens on both sides, {seconds:.1f} s of speech",
        )
    ]


def ttfa_ms(side: Side, text: str, voice: str) -> float:
    return 1e3 * side.speak(text, voice=voice).ttfa_seconds


def _voice(mode: str, seconds: int) -> str:
    return f"ttfa-{mode}-{seconds}"
