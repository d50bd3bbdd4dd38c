"""A thousand voices are registered at once while streams run."""

import http.client
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import httpx

from benchmarks.bench import Bench, clip
from benchmarks.measure import AtMost, RatioAtMost, Row, Summary
from benchmarks.sides import Side
from benchmarks.streams import Bystanders, quiet_seconds

NAME = "bulk_registration"
NUM_VOICES, QUICK_NUM_VOICES = 1_000, 60
NUM_AT_ONCE = 32  # connections
CLIP_SECONDS = 1.1
ASK_SECONDS = 1.0
TIMEOUT_SECONDS = 1_800.0
MAX_RPC_PER_SECOND = 10
MAX_SECONDS, MAX_GAP_RATIO = 30.0, 1.5  # of all registrations; of the streams' p99
# How we look on is not what is measured.
STATS_METHOD = "tts_cache_stats"

Samples = dict[tuple[str, str], list[float]]


def run(bench: Bench) -> list[Row]:
    num_voices = bench.size(NAME, full=NUM_VOICES, quick=QUICK_NUM_VOICES)
    bench.step(f"{NAME}: warming up")
    streams = Bystanders(bench, "while voices are registered")
    bench.sides.both(streams.register)
    samples: Samples = defaultdict(list)
    for number, side in bench.sides.in_turns(bench.num_rounds):
        bench.step(f"{NAME}: round {number + 1}, {side.name}")
        # Ahead, so that the client takes as little as it can of the two cores.
        requests = [_request(bench, side) for _ in range(num_voices)]
        quiet = quiet_seconds(bench)
        with streams.beside(side, quiet, quiet_after_seconds=quiet):
            _register(side, requests, samples)
    bench.step(f"{NAME}: beside a program of the lowest priority")
    floor = streams.floor_rows(bench.sides.ours, bench.pick(full=20.0, quick=3.0))
    return _rows(streams, samples, num_voices) + floor


def _request(bench: Bench, side: Side) -> httpx.Request:
    # In a quick run too the mode that needs every encoder: all of them are counted.
    *_, fields = bench.model.modes.values()
    name = f"bulk-{bench.number()}"
    request = side.client.http.build_request(
        "POST",
        "/v1/audio/voices",
        data={**fields, "name": name, "consent": "bench", "precompute": "true"},
        files={"audio_sample": ("clip.wav", clip(CLIP_SECONDS, bench.number()))},
    )
    request.read()
    return request


class _Connections(threading.local):
    """One for each thread."""

    def __init__(self, url: httpx.URL):
        self._kept = http.client.HTTPConnection(url.host, url.port, timeout=60)

    def send(self, request: httpx.Request) -> None:
        """Send a request. Raises: RuntimeError unless the answer is a 200."""
        headers = {k: v for k, v in request.headers.items() if k != "host"}
        self._kept.request("POST", request.url.path, request.content, headers)
        answer = self._kept.getresponse()
        if (said := answer.read()) and answer.status != httpx.codes.OK:
            raise RuntimeError(f"{answer.status} {said[:500]!r}")


def _register(side: Side, requests: list[httpx.Request], samples: Samples) -> None:
    connections = _Connections(side.client.http.base_url)
    encodes, calls = side.encodes(), _num_calls(side)
    began = time.perf_counter()
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        for done in [pool.submit(connections.send, each) for each in requests]:
            done.result()
    samples[side.name, "answered"].append(time.perf_counter() - began)
    if not side.is_ours:
        return
    _wait_until_encoded(side, encodes, len(requests))
    took = time.perf_counter() - began
    samples[side.name, "ready"].append(took)
    if calls is not None and (after := _num_calls(side)) is not None:
        samples[side.name, "rpc"].append((after - calls) / took)


def _wait_until_encoded(side: Side, before: dict[str, int], num_voices: int) -> None:
    """Until each encoder has encoded so many more.

    Raises: RuntimeError if that takes too long.
    """
    until = time.monotonic() + TIMEOUT_SECONDS
    while True:
        now = side.encodes()
        if now and min(now[name] - before.get(name, 0) for name in now) >= num_voices:
            return
        if time.monotonic() > until:
            raise RuntimeError(f"not encoded in {TIMEOUT_SECONDS:g} s: {now}")
        time.sleep(ASK_SECONDS)


def _num_calls(side: Side) -> int | None:
    """RPCs that the worker has answered; None from a server that does not count."""
    if not side.is_ours:
        return None
    counts = [worker.get("rpc_calls") for worker in side.client.stats()["workers"]]
    if None in counts:
        return None
    every = [
        number
        for methods in counts
        for method, number in methods.items()
        if method != STATS_METHOD
    ]
    return sum(every)


def _rows(streams: Bystanders, samples: Samples, num_voices: int) -> list[Row]:
    def of(side: str, what: str) -> Summary:
        return Summary.of(samples[side, what])

    voices = f"{num_voices:,} voices at once"
    rows = [
        Row(
            f"{voices}: all registrations answered",
            "s",
            of("ours", "answered"),
            of("stock", "answered"),
            target=AtMost(MAX_SECONDS) if num_voices == NUM_VOICES else None,
            note=f"{NUM_AT_ONCE} connections",
        ),
        Row(
            f"{voices}: all are encoded",
            "s",
            of("ours", "ready"),
            no_stock="encodes in the first request",
        ),
    ]
    if samples["ours", "rpc"]:
        rows.append(
            Row(
                f"{voices}: RPCs into the decode loop",
                "1/s",
                of("ours", "rpc"),
                target=AtMost(MAX_RPC_PER_SECOND),
                no_stock="its workers are not asked",
                note="until all are encoded",
            )
        )
    return rows + streams.rows(target=RatioAtMost(MAX_GAP_RATIO))
