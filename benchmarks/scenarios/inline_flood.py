"""Abandoned requests with inline references, and one registered voice behind them."""

import asyncio
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from benchmarks.bench import Bench, clip
from benchmarks.measure import AtMost, RatioAtMost, Row, Summary
from benchmarks.sides import Side
from benchmarks.streams import Bystanders, quiet_seconds
from vllm_tts_cache.testing.server import MODEL_NAME, data_url

NAME = "inline_flood"
NUM_REQUESTS, QUICK_NUM_REQUESTS = 200, 40
CLIP_SECONDS = 3
# Long enough for a server to have taken most of them in, and queued them.
LEAVE_AFTER_SECONDS = 5.0
MAX_JOBS = 1
REFUSED = 503

Samples = dict[tuple[str, str], list[float]]


def run(bench: Bench) -> list[Row]:
    num_requests = bench.size(NAME, full=NUM_REQUESTS, quick=QUICK_NUM_REQUESTS)
    bench.step(f"{NAME}: warming up")
    streams = Bystanders(bench, "while a flood is abandoned")
    bench.sides.both(streams.register)
    for side in bench.sides:
        _speak_cold(bench, side)  # a server's first encode is slower
    samples: Samples = defaultdict(list)
    for number, side in bench.sides.in_turns(bench.num_rounds):
        bench.step(f"{NAME}: round {number + 1}, {side.name}")
        bodies = [_body(bench) for _ in range(num_requests)]
        # Beside the streams, or they would be part of the difference.
        with streams.beside(side, quiet_seconds(bench)):
            samples[side.name, "without"].append(_speak_cold(bench, side))
            refused = asyncio.run(_flood(side, bodies))
            samples[side.name, "refused"].append(refused)
            _behind(bench, side, samples)
        side.speak(bench.short_text(), voice="bystander-0")  # it has recovered
    return _rows(streams, samples, num_requests)


def _behind(bench: Bench, side: Side, samples: Samples) -> None:
    """One registered voice that is cold, asked for when the flood has left."""
    voice = _register(bench, side)
    before = _num_encodes(side)
    with ThreadPoolExecutor(1) as pool:
        spoken = pool.submit(_seconds, bench, side, voice)
        if side.is_ours:
            began = time.perf_counter()
            side.precompute(voice)  # the same job, and it says when that has ended
            samples[side.name, "ready"].append(time.perf_counter() - began)
            # Its own is one of them.
            samples[side.name, "jobs"].append(_num_encodes(side) - before - 1)
        samples[side.name, "behind"].append(spoken.result())


async def _flood(side: Side, bodies: list[dict[str, Any]]) -> int:
    """Send all at once, leave together; returns how many were refused before."""
    limits = httpx.Limits(max_connections=len(bodies))
    url = f"{side.client.http.base_url}/v1/audio/speech"
    async with httpx.AsyncClient(limits=limits, timeout=None) as client:

        async def ask(body: dict[str, Any]) -> int:
            try:
                return (await client.post(url, json=body)).status_code
            except httpx.TransportError:
                return 0

        asked = [asyncio.create_task(ask(body)) for body in bodies]
        done, left = await asyncio.wait(asked, timeout=LEAVE_AFTER_SECONDS)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
    return sum(task.result() == REFUSED for task in done)


def _body(bench: Bench) -> dict[str, Any]:
    return {
        "model": MODEL_NAME,
        "input": bench.short_text(),
        "response_format": "pcm",
        "ref_audio": data_url(clip(CLIP_SECONDS, bench.number())),
        **bench.model.inline,
    }


def _speak_cold(bench: Bench, side: Side) -> float:
    return _seconds(bench, side, _register(bench, side))


def _register(bench: Bench, side: Side) -> str:
    """A registered voice that nobody has encoded."""
    voice, sample = f"flooded-{bench.number()}", clip(CLIP_SECONDS, bench.number())
    side.register(voice, sample, **bench.model.modes[bench.fullest_mode])
    return voice


def _seconds(bench: Bench, side: Side, voice: str) -> float:
    return side.speak(bench.short_text(), voice=voice).ttfa_seconds


def _num_encodes(side: Side) -> int:
    """Clips that have been encoded by whichever encoder has encoded most."""
    return max(side.encodes().values(), default=0)


def _rows(streams: Bystanders, samples: Samples, num_requests: int) -> list[Row]:
    def of(side: str, what: str) -> Summary:
        return Summary.of(samples[side, what])

    behind = f"a registered cold voice behind {num_requests} abandoned inline requests"
    num_refused = max(samples["ours", "refused"])
    return [
        Row(
            f"{behind}: first audio",
            "s",
            of("ours", "behind"),
            of("stock", "behind"),
            note=f"ours refused up to {num_refused:.0f} of them with {REFUSED}",
        ),
        Row(
            f"{behind}: first audio, against no flood",
            "s",
            of("ours", "behind"),
            of("ours", "without"),
            versus="ours, no flood",
        ),
        Row(
            f"{behind}: until it is encoded",
            "s",
            of("ours", "ready"),
            no_stock="encodes in the request",
        ),
        Row(
            f"{behind}: other clips encoded meanwhile",
            "jobs",
            of("ours", "jobs"),
            target=AtMost(MAX_JOBS),
            no_stock="does not count",
        ),
        *streams.rows(target=RatioAtMost(1.2)),
    ]
