"""Streams that run in the background, and when their chunks came."""

import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from benchmarks.sides import Side
from vllm_tts_cache.testing.server import MODEL_NAME

_SETTLE_SECONDS = 0.5


class RunningStreams:
    """Streams of long texts, one after another on each thread, until closed.

    Use as a context manager; a stream that fails is raised when it ends.
    """

    def __init__(self, side: Side, bodies: list[Callable[[], dict[str, Any]]]):
        self._side = side
        self._stop = threading.Event()
        self._streams: list[list[float]] = []
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(body,)) for body in bodies
        ]

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

    def __enter__(self) -> "RunningStreams":
        for thread in self._threads:
            thread.start()
        until = time.monotonic() + 60
        while len([s for s in self._streams if s]) < len(self._threads):
            if self._errors or time.monotonic() > until:
                break
            time.sleep(0.02)
        time.sleep(_SETTLE_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def _run(self, body: Callable[[], dict[str, Any]]) -> None:
        try:
            while not self._stop.is_set():
                self._listen(body())
        except Exception as exc:  # noqa: BLE001  raised again where the thread is joined
            self._errors.append(exc)

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
