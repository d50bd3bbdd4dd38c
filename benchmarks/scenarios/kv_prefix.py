"""A voice's first and second text: what is found in the KV of its prefix."""

import re
import time
from collections import defaultdict
from dataclasses import dataclass

from benchmarks.bench import Bench, clip
from benchmarks.measure import AtLeast, RatioAtMost, Row, Summary
from benchmarks.scenarios.ttfa import ttfa_ms
from benchmarks.sides import Side

NAME = "kv_prefix"
SECONDS = 30
NUM_WARM_UPS = 2
MIN_SHARE_PERCENT = 85
MAX_FIRST_RATIO = 1.1
COUNTED_TIMEOUT_SECONDS = 30.0
# The host may count what was found later than the request: of two samples one was 0.
FOUND_SECONDS = 3.0
WARMED_TIMEOUT_SECONDS = 60.0

# (side, "first" or "again") -> what was seen of each request
Seen = dict[tuple[str, str], list["Prefill"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """One request.

    Attributes:
        found_percent: Share of its prompt that was found in the KV.
        prefill_ms: From when the stage first scheduled it to its first token.
        ttfa_ms: Time to first audio.
    """

    found_percent: float
    prefill_ms: float
    ttfa_ms: float


def run(bench: Bench) -> list[Row]:
    """Voices speak their first text, on ours prefilled before, and then another."""
    bench.step(f"{NAME}: warming up")
    for side in bench.sides:
        for _ in range(NUM_WARM_UPS):
            _speak_twice(bench, side, defaultdict(list))
    seen: Seen = defaultdict(list)
    for number, side in bench.sides.in_turns(bench.num_rounds):
        bench.step(f"{NAME}: round {number + 1}, {side.name}")
        for _ in range(2):
            _speak_twice(bench, side, seen)
    return _rows(seen)


def _speak_twice(bench: Bench, side: Side, seen: Seen) -> None:
    voice = f"prefix-{bench.number()}"
    # 30 s is the limit, and a rounding above it is refused.
    sample = clip(SECONDS - 0.01, bench.number())
    num_warmed = _num_warmed(side)
    side.register(voice, sample, **bench.model.modes[bench.fullest_mode])
    side.precompute(voice)
    _wait_until_warmed(side, num_warmed)
    for when in ("first", "again"):
        seen[side.name, when].append(_speak(side, bench.text(1), voice))


def _num_warmed(side: Side) -> int | None:
    """Voices that were prefilled while nobody spoke; None on stock."""
    if side.is_stock:
        return None
    return side.client.stats()["kv_warming"]["warmed"]


def _wait_until_warmed(side: Side, num_before: int | None) -> None:
    until = time.monotonic() + WARMED_TIMEOUT_SECONDS
    while num_before is not None and _num_warmed(side) == num_before:
        if time.monotonic() > until:
            raise RuntimeError(f"{side.name} did not prefill a voice")
        time.sleep(0.1)


def _speak(side: Side, text: str, voice: str) -> Prefill:
    before = _Counters.of(side)
    took = ttfa_ms(side, text, voice)
    after = _counted(side, before.num_requests + 1)
    had = after.num_prompt_tokens - before.num_prompt_tokens
    found = after.num_found_tokens - before.num_found_tokens
    return Prefill(
        found_percent=100 * found / had,
        prefill_ms=1e3 * (after.prefill_seconds - before.prefill_seconds),
        ttfa_ms=took,
    )


@dataclass(frozen=True, slots=True)
class _Counters:
    """vLLM's own, of the stage that prefills; a request counts when it has ended."""

    num_requests: float
    num_prompt_tokens: float
    num_found_tokens: float
    prefill_seconds: float

    @classmethod
    def of(cls, side: Side) -> "_Counters":
        shown = side.client.http.get("/metrics").raise_for_status().text

        def total(name: str) -> float:
            pattern = rf'^vllm:{name}\{{.*stage="0".*\}} (\S+)$'
            return sum(map(float, re.findall(pattern, shown, re.MULTILINE)))

        return cls(
            total("request_prefill_time_seconds_count"),
            total("prompt_tokens_total"),
            total("prefix_cache_hits_total"),
            total("request_prefill_time_seconds_sum"),
        )


def _counted(side: Side, num_requests: float) -> _Counters:
    """The counters when the last request is among them: audio may end before."""
    until = time.monotonic() + COUNTED_TIMEOUT_SECONDS
    while _Counters.of(side).num_requests < num_requests:
        if time.monotonic() > until:
            raise RuntimeError(f"{side.name} did not count a request")
        time.sleep(0.05)
    time.sleep(FOUND_SECONDS)
    return _Counters.of(side)


def _rows(seen: Seen) -> list[Row]:
    def of(side: str, when: str, field: str) -> Summary:
        return Summary.of([getattr(one, field) for one in seen[side, when]])

    rows = [
        Row(
            f"prompt found in the KV, new text, {SECONDS} s reference",
            "%",
            of("ours", "again", "found_percent"),
            of("stock", "again", "found_percent"),
            target=AtLeast(MIN_SHARE_PERCENT),
        ),
        Row(
            f"prefill of a voice's second text, {SECONDS} s reference",
            "ms",
            of("ours", "again", "prefill_ms"),
            of("stock", "again", "prefill_ms"),
        ),
    ]
    titles = {
        "prefill_ms": ("prefill", None),
        "ttfa_ms": ("time to first audio", RatioAtMost(MAX_FIRST_RATIO)),
    }
    for field, (title, target) in titles.items():
        rows.append(
            Row(
                f"{title} of a voice's first text, against its second",
                "ms",
                of("ours", "first", field),
                of("ours", "again", field),
                target=target,
                versus="ours, second",
            )
        )
    return rows
