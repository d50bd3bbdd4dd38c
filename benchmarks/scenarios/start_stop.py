"""How long a server starts, and what its streams and it do when it is told to stop."""

import signal
import threading
import time
from collections import defaultdict

import httpx

from benchmarks.bench import Bench, clip
from benchmarks.measure import AtMost, DifferenceAtMost, Row, Summary
from benchmarks.sides import Side, open_sides

NAME = "start_stop"
NUM_VOICES, QUICK_NUM_VOICES = 20, 3
CLIP_SECONDS = 3.0
NUM_STREAMS = 3
VOICE = "start-stop-0"
MAX_MORE_SECONDS = 1.0  # of a warm start, above stock's
GRACE_SECONDS = 30.0  # what an orchestrator gives a server that it ends
_TIMEOUT_SECONDS = 120.0

Samples = dict[tuple[str, str], list[float]]


def run(bench: Bench) -> list[Row]:
    """Start both in turns, one beside nothing, with voices that are encoded."""
    sides = open_sides(bench.model, bench.work / NAME)
    num_voices = bench.size(NAME, full=NUM_VOICES, quick=QUICK_NUM_VOICES)
    for side in sides:  # the first start also fills caches of the host's
        bench.step(f"{NAME}: registering {num_voices} voices, {side.name}")
        side.start()
        try:
            _register(bench, side, num_voices)
        finally:
            side.stop()
    samples: Samples = defaultdict(list)
    for number, side in sides.in_turns(bench.num_rounds):
        bench.step(f"{NAME}: round {number + 1}, {side.name}")
        began = time.perf_counter()
        side.restart()  # it is stopped already
        samples[side.name, "start"].append(time.perf_counter() - began)
        try:
            began = time.perf_counter()
            side.speak(bench.short_text(), voice=VOICE)
            samples[side.name, "first"].append(time.perf_counter() - began)
            _stop_under_load(bench, side, samples)
        finally:
            side.stop()
    return _rows(samples, num_voices)


def _register(bench: Bench, side: Side, num_voices: int) -> None:
    fields = bench.model.modes[bench.fullest_mode]
    for number in range(num_voices):
        sample = clip(CLIP_SECONDS, bench.number())
        side.register(f"start-stop-{number}", sample, **fields)
        side.precompute(f"start-stop-{number}")
    side.speak(bench.short_text(), voice=VOICE)


class _Stream(threading.Thread):
    """Speaks a text of some seconds, and says how that ended."""

    def __init__(self, side: Side, text: str):
        super().__init__()
        self._side, self._text = side, text
        self.has_begun = threading.Event()
        self.is_whole = False

    def run(self) -> None:
        body = {"input": self._text, "voice": VOICE, "response_format": "pcm"}
        body |= {"stream": True, "stream_format": "audio"}
        http = self._side.client.http
        try:
            with http.stream("POST", "/v1/audio/speech", json=body) as answer:
                for _ in answer.iter_raw():
                    self.has_begun.set()
            self.is_whole = answer.status_code == httpx.codes.OK
        except httpx.HTTPError:
            pass
        self.has_begun.set()


def _stop_under_load(bench: Bench, side: Side, samples: Samples) -> None:
    """SIGTERM while streams run, as an orchestrator does."""
    streams = [_Stream(side, bench.text(4)) for _ in range(NUM_STREAMS)]
    for stream in streams:
        stream.start()
    for stream in streams:
        if not stream.has_begun.wait(_TIMEOUT_SECONDS):
            raise RuntimeError(f"{side.name}: a stream did not begin")
    began = time.perf_counter()
    side.signal(signal.SIGTERM)
    try:
        side.wait_until_ended(GRACE_SECONDS)
    except TimeoutError:  # an orchestrator kills it then
        side.signal(signal.SIGKILL)
    samples[side.name, "stop"].append(time.perf_counter() - began)
    for stream in streams:
        stream.join(_TIMEOUT_SECONDS)
    cut_off = sum(not stream.is_whole for stream in streams)
    samples[side.name, "cut off"].append(cut_off)


def _rows(samples: Samples, num_voices: int) -> list[Row]:
    def row(what: str, key: str, unit: str, **more: object) -> Row:
        ours, stock = (Summary.of(samples[name, key]) for name in ("ours", "stock"))
        return Row(what, unit, ours, stock, **more)  # type: ignore[arg-type]

    return [
        row(
            f"a start, {num_voices} voices encoded",
            "start",
            "s",
            target=DifferenceAtMost(MAX_MORE_SECONDS),
        ),
        row("the first request after it, to its end", "first", "s"),
        row(
            f"SIGTERM beside {NUM_STREAMS} streams until all has ended",
            "stop",
            "s",
            target=AtMost(GRACE_SECONDS - 1),
            note=f"a server that stays is killed after {GRACE_SECONDS:g} s",
        ),
        row("streams of them that broke off", "cut off", "", target=AtMost(0.0)),
    ]
