"""The first request for a voice: after an upload, a restart, an eviction."""

import time
from collections.abc import Callable, Sequence

from benchmarks.bench import Bench, clip
from benchmarks.measure import AtMost, RatioAtMost, Row, Summary
from benchmarks.scenarios.ttfa import ttfa_ms
from benchmarks.sides import Side

NAME = "first_request"
SECONDS = 10
NUM_WARM_UPS = 2
READY_TIMEOUT_SECONDS = 60.0

# Encodings that a worker keeps in memory after the restart: fewer than the voices
# that take turns, so that every one has been evicted when its turn comes. One round has
# five voices.
MAX_ENTRIES = 4
NUM_VOICES_IN_TURN = 10


def run(bench: Bench) -> list[Row]:
    """A quick run leaves out what needs a restart."""
    found = _after_upload(bench)
    if not bench.is_quick:
        found += _after_restart(bench)
    return found


def _after_upload(bench: Bench) -> list[Row]:
    first: dict[str, list[float]] = {}
    warm: dict[str, list[float]] = {}
    num_encodes = []
    for number, side in bench.sides.in_turns(bench.num_rounds):
        bench.step(f"{NAME}: after upload, round {number + 1}, {side.name}")
        for _ in range(bench.pick(full=3, quick=1)):
            voice = _upload(bench, side)
            before = sum(side.encodes().values())
            once, again = _pair(bench, side, voice)
            first.setdefault(side.name, []).append(once)
            warm.setdefault(side.name, []).append(again)
            if side.is_ours:
                num_encodes.append(sum(side.encodes().values()) - before)
    row = Row(
        f"after upload, {bench.fullest_mode}, {SECONDS} s reference",
        "ms",
        Summary.of(first["ours"]),
        Summary.of(first["stock"]),
    )
    second = _rows(bench, "after upload", first["ours"], warm["ours"], num_encodes)
    return [row, *second]


def _after_restart(bench: Bench) -> list[Row]:
    # Each side alone, and ours last: it stays up for what follows.
    stock, _ = _restarted(bench, bench.sides.stock)
    pairs, voices = _restarted(
        bench, bench.sides.ours, SPEAKER_CACHE_MAX_ENTRIES=str(MAX_ENTRIES)
    )
    side = bench.sides.ours
    first, warm = zip(*pairs, strict=True)
    beside = Row(
        f"after restart, {bench.fullest_mode}, {SECONDS} s reference",
        "ms",
        Summary.of(first),
        Summary.of([once for once, _ in stock]),
    )
    restart = _rows(bench, "after restart", first, warm, [sum(side.encodes().values())])
    if bench.model.shares_kv:
        # A worker reads no encoding for a voice whose prefix is still in the KV.
        return [beside, *restart]
    evicted = _after_eviction(bench, side, voices[-NUM_VOICES_IN_TURN:])
    return [beside, *restart, *evicted]


def _restarted(
    bench: Bench, side: Side, **environ: str
) -> tuple[list[tuple[float, float]], list[str]]:
    """Each voice's first and second request after a restart, and the voices."""
    bench.step(f"{NAME}: restarting {side.name}")
    voices = [_upload(bench, side) for _ in range(3 * bench.num_rounds + NUM_WARM_UPS)]
    side.restart(**environ)
    # The server's own first requests are slow whoever speaks.
    for voice in voices[:NUM_WARM_UPS]:
        _pair(bench, side, voice)
    bench.step(f"{NAME}: after restart, {side.name}")
    return [_pair(bench, side, voice) for voice in voices[NUM_WARM_UPS:]], voices


def _after_eviction(bench: Bench, side: Side, voices: Sequence[str]) -> list[Row]:
    bench.step(f"{NAME}: after eviction from memory")
    before, encodes = _disk_hits(side), sum(side.encodes().values())
    pairs = [
        _pair(bench, side, voice)
        for _ in range(2 * bench.num_rounds // 5 + 1)
        for voice in voices
    ]
    if _disk_hits(side) - before < len(pairs):
        raise RuntimeError("the voices had not been evicted from memory")
    first, warm = zip(*pairs, strict=True)
    num_encodes = sum(side.encodes().values()) - encodes
    return _rows(bench, "after eviction from memory", first, warm, [num_encodes])


def _rows(
    bench: Bench,
    when: str,
    first: Sequence[float],
    warm: Sequence[float],
    num_encodes: list[int],
) -> list[Row]:
    shares_kv = bench.model.shares_kv
    return [
        Row(
            f"{when}, against the voice's second request",
            "ms",
            Summary.of(first),
            Summary.of(warm),
            versus="ours, second",
            target=RatioAtMost(bench.model.first_max_ratio),
            note="the second finds the prefix in the KV" if shares_kv else "",
        ),
        Row(
            f"encodes in requests {when}",
            "encodes",
            Summary.of([sum(num_encodes)]),
            target=AtMost(0),
        ),
    ]


def _upload(bench: Bench, side: Side) -> str:
    """A new voice; on ours, when its background precompute has ended."""
    voice = f"first-{bench.number()}"
    sample = clip(SECONDS, bench.number())
    fields = bench.model.modes[bench.fullest_mode]
    side.register(voice, sample, **{**fields, "precompute": "true"})
    if side.is_ours:
        _wait_until(lambda: _status(side, voice) == "ready", voice)
    return voice


def _status(side: Side, voice: str) -> str:
    answer = side.client.http.get(f"/v1/audio/voices/{voice}/cache")
    return answer.raise_for_status().json()["cache_status"]


def _wait_until(is_done: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + READY_TIMEOUT_SECONDS
    while not is_done():
        if time.monotonic() > until:
            raise RuntimeError(f"{what} was not ready in {READY_TIMEOUT_SECONDS} s")
        time.sleep(0.02)


def _pair(bench: Bench, side: Side, voice: str) -> tuple[float, float]:
    """The first request's time to first audio, and the second's."""
    once = ttfa_ms(side, bench.short_text(), voice)
    return once, ttfa_ms(side, bench.short_text(), voice)


def _disk_hits(side: Side) -> int:
    return sum(worker["hits"]["disk"] for worker in side.client.stats()["workers"])
