"""Streams that run in the background, and how long their chunks kept them waiting."""

import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeVar

from benchmarks import lowest, machine
from benchmarks.bench import Bench, clip
from benchmarks.measure import OURS, STOCK, Point, RatioAtMost, Row, Summary, percentile
from benchmarks.sides import Side
from vllm_tts_cache.testing.server import MODEL_NAME, data_url

NUM_STREAMS = 3
QUICK_COLD_SECONDS = 6
QUIET = "quiet"
LOWEST = "while another program computes at the lowest priority"
_SENTENCES = 40
_COMPUTE = "while True: pass"
_SETTLE_SECONDS = 0.5

B = TypeVar("B", bound="Background")


def quiet_seconds(bench: Bench) -> float:
    """How long streams are looked at before, or after, they are disturbed.

    In six seconds three streams have some 150 gaps, whose p99 is the second longest.
    """
    return bench.pick(full=30.0, quick=3.0)


class Background:
    """The same act again and again on a thread each, until closed.

    Use as a context manager; what an act raises is raised when it ends.
    """

    def __init__(self, acts: Sequence[Callable[[], None]]):
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(act,)) for act in acts
        ]

    def __enter__(self: B) -> B:
        for thread in self._threads:
            thread.start()
        self._wait_until_running()
        time.sleep(_SETTLE_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def _wait_until_running(self) -> None:
        """Return at once, unless it takes something to see that all run."""

    def _run(self, act: Callable[[], None]) -> None:
        try:
            while not self._stop.is_set():
                act()
        except Exception as exc:  # noqa: BLE001  raised again where the thread is joined
            self._errors.append(exc)


class RunningStreams(Background):
    """Streams of long texts, one after another on each thread."""

    def __init__(self, side: Side, bodies: list[Callable[[], dict[str, Any]]]):
        super().__init__([lambda body=body: self._listen(body()) for body in bodies])
        self._side = side
        self._streams: list[list[float]] = []

    def gaps_ms(self, began: float, ended: float) -> list[float]:
        """Times between chunks of one stream, of those that ended in the interval.

        The wait for a stream's first chunk is no gap.
        """
        found = []
        for arrivals in list(self._streams):
            times = list(arrivals)
            gaps = pairwise(times)
            found += [1e3 * (b - a) for a, b in gaps if began < b <= ended]
        return found

    def _wait_until_running(self) -> None:
        until = time.monotonic() + 60
        while len([s for s in self._streams if s]) < len(self._threads):
            if self._errors or time.monotonic() > until:
                break
            time.sleep(0.02)

    def _listen(self, body: dict[str, Any]) -> None:
        arrivals: list[float] = []
        self._streams.append(arrivals)
        fixed = {
            "model": MODEL_NAME,
            "seed": 7,
            "response_format": "pcm",
            "stream": True,
            "stream_format": "audio",
        }
        http = self._side.client.http
        with http.stream("POST", "/v1/audio/speech", json={**fixed, **body}) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code} {answer.read()[:500]!r}")
            for _ in answer.iter_raw():
                arrivals.append(time.perf_counter())
                if self._stop.is_set():
                    return


class Bystanders:
    """Streams beside what is measured: their gaps, by side and by what happened.

    Args:
        bench: The run.
        disturbance: What happens beside them, as the table says it: ``while ...``.
    """

    def __init__(self, bench: Bench, disturbance: str):
        self._bench, self._disturbance = bench, disturbance
        self._every: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._p99: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._idle: dict[str, list[float]] = defaultdict(list)

    def register(self, side: Side) -> None:
        """Make the streams' voices known and warm."""
        make_warm(self._bench, side, map(_voice, range(NUM_STREAMS)))

    @contextmanager
    def beside(
        self, side: Side, quiet_seconds: float, *, quiet_after_seconds: float = 0.0
    ) -> Iterator[None]:
        """Stream; after a quiet time the block is what disturbs.

        Where that takes long, a quiet time after it shows how the machine has changed.
        """

        def body(stream: int) -> dict[str, object]:
            return {"input": self._bench.text(_SENTENCES), "voice": _voice(stream)}

        bodies = [lambda stream=stream: body(stream) for stream in range(NUM_STREAMS)]
        with RunningStreams(side, bodies) as streams:
            began, idle = time.perf_counter(), machine.idle_seconds()
            time.sleep(quiet_seconds)
            disturbed, idle = time.perf_counter(), machine.idle_seconds() - idle
            yield
            time.sleep(_SETTLE_SECONDS)  # a stream that was held up goes on first
            ended = time.perf_counter()
            time.sleep(quiet_after_seconds)
            closed = time.perf_counter()
        name = STOCK if side.is_stock else OURS
        self._idle[name].append(idle / (disturbed - began))
        self.keep(name, QUIET, streams.gaps_ms(began, disturbed))
        self.keep(name, self._disturbance, streams.gaps_ms(disturbed, ended))
        if quiet_after_seconds:
            self.keep(name, QUIET, streams.gaps_ms(ended, closed))

    def keep(self, side: str, state: str, gaps_ms: list[float]) -> None:
        """Add a round's gaps.

        Raises: RuntimeError if there are none: then no chunk came all the while.
        """
        if not gaps_ms:
            raise RuntimeError(f"{side}: no stream had two chunks, {state}")
        self._every[side, state] += gaps_ms
        self._p99[side, state].append(percentile(gaps_ms, 99))

    def floor_rows(self, side: Side, seconds: float) -> list[Row]:
        """What no program can avoid that uses the cores which the streams leave idle.

        A process that shares nothing with the server computes on one core, as a thread
        that encodes does.
        """
        another = Bystanders(self._bench, LOWEST)
        for _ in range(self._bench.num_rounds):
            with another.beside(side, seconds), _computing():
                time.sleep(seconds)
        found = another.rows(target=None)
        return [row for row in found if LOWEST in row.what and "every" not in row.what]

    def idle_cores(self, side: str) -> list[float]:
        """Cores of the machine that the quiet streams left over, of each round."""
        return self._idle[side]

    def rows(
        self,
        *,
        target: RatioAtMost | None,
        picture: str = "",
        no_stock: str = "",
    ) -> list[Row]:
        """All gaps, the p99 of each round, and ours disturbed against ours quiet.

        Stock's are there if its gaps were kept.
        """
        rows = []
        for state in (QUIET, self._disturbance):
            point = Point(picture, state) if picture else None
            for what, samples in (("every one", self._every), ("p99", self._p99)):
                stock = samples.get((STOCK, state))
                rows.append(
                    Row(
                        f"gap between chunks, {state}, {what}",
                        "ms",
                        Summary.of(samples[OURS, state]),
                        Summary.of(stock) if stock else None,
                        no_stock=no_stock,
                        point=point if samples is self._every else None,
                    )
                )
        quiet, disturbed = (
            Summary.of(self._p99[OURS, state]) for state in (QUIET, self._disturbance)
        )
        against = Row(
            f"p99 gap, {self._disturbance}, against quiet",
            "ms",
            disturbed,
            quiet,
            versus="ours, quiet",
            target=target,
        )
        return [*rows, against]


@contextmanager
def _computing() -> Iterator[None]:
    process = subprocess.Popen(lowest.command(sys.executable, "-c", _COMPUTE))
    try:
        yield
    finally:
        process.kill()
        process.wait()


def make_warm(bench: Bench, side: Side, voices: Iterable[str]) -> None:
    """Register voices in the cheapest mode, and let each speak once."""
    fields = bench.model.modes[bench.model.cheapest_mode]
    for voice in voices:
        side.register(voice, clip(3, bench.number()), **fields)
        side.precompute(voice)
        side.speak(bench.short_text(), voice=voice)


def speak_cold(bench: Bench, side: Side) -> float:
    """Seconds of one request whose reference nobody has seen."""
    seconds = bench.pick(full=bench.model.cold_seconds, quick=QUICK_COLD_SECONDS)
    reference = data_url(clip(seconds, bench.number()))
    began = time.perf_counter()
    side.speak(bench.short_text(), ref_audio=reference, **bench.model.inline)
    return time.perf_counter() - began


def _voice(stream: int) -> str:
    return f"bystander-{stream}"
