"""Brings the series up to date in the background, so that a scrape only reads them."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm_tts_cache.catalogue.catalogue import Catalogue
from vllm_tts_cache.catalogue.record import Segment
from vllm_tts_cache.catalogue.stored_files import Usage
from vllm_tts_cache.entrypoints.decoders import Decoders
from vllm_tts_cache.entrypoints.executors import BoundedExecutor
from vllm_tts_cache.entrypoints.metrics.series import Metrics
from vllm_tts_cache.entrypoints.metrics.sharing import Turn
from vllm_tts_cache.entrypoints.metrics.worker_figures import Growth, WorkerFigures
from vllm_tts_cache.errors import log_text_of
from vllm_tts_cache.speaker.rpc_client import (
    STATS,
    AsyncWorkers,
    UnsupportedModelError,
)
from vllm_tts_cache.store.speaker_store import SpeakerStore
from vllm_tts_cache.throttled_log import ThrottledLog

throttled = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))

PERIOD_SECONDS = 5.0
# A talker answers between two steps, a diffusion model between two batches, and the
# host hands on no request meanwhile: asking takes one part in so many of the time.
PAUSE_OF_ANSWERS = 20
MAX_PERIOD_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    num_voices: int
    num_unfinished: int
    usage: dict[Segment, dict[str, Usage]]


class MetricsRefresh:
    """Asks every few seconds what the API process does not count itself.

    For the event loop only.

    Args:
        workers: None if the model that is served has none.
        num_flights: Tells how many encodings this process waits for.
        shared_with: The directory of the host's API processes, if there are several.
    """

    def __init__(
        self,
        metrics: Metrics,
        store: SpeakerStore,
        workers: Callable[[], AsyncWorkers | None],
        decoders: Decoders,
        num_flights: Callable[[], int],
        shared_with: Path | None,
    ):
        self._metrics = metrics
        self._store = store
        self._workers = workers
        self._decoders = decoders
        self._num_flights = num_flights
        self._turn = Turn(shared_with)
        self._figures: WorkerFigures | None = None
        self._own = Growth(is_first=True)
        self._threads = BoundedExecutor("a look", num_threads=1, max_waiting=1)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; needs a running event loop."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def shutdown(self) -> None:
        """Stop; another API process goes on."""
        if self._task is not None:
            self._task.cancel()
        self._threads.shutdown()
        self._turn.close()

    async def refresh(self) -> None:
        """Bring everything up to date.

        Raises: TTSCacheError, OSError.
        """
        self._metrics.encodings_awaited.set(self._num_flights())
        for segment, number in self._store.evictions.snapshot().items():
            growth = self._own.of(number, segment)
            self._metrics.evictions.labels("disk", segment).inc(growth)
        if not self._turn.is_ours():
            return
        self._show(await self._threads.run(_look, self._store.catalogue))
        await self._ask()

    async def _run(self) -> None:
        pause_seconds = PERIOD_SECONDS
        while True:
            await asyncio.sleep(pause_seconds)
            began_at = time.monotonic()
            try:
                await self.refresh()
            except Exception as exc:  # noqa: BLE001  the next time may do
                reason = log_text_of(exc)
                throttled.warn_of("metrics", "Metrics are not refreshed: %s", reason)
            pause_seconds = pause_after(time.monotonic() - began_at)

    async def _ask(self) -> None:
        if (workers := self._workers()) is None:
            return
        try:
            answers = await workers.call(STATS)
        except UnsupportedModelError:
            return
        decoders = await self._decoders.stats()
        if self._figures is None:
            growth = Growth(is_first=self._turn.is_first)
            self._figures = WorkerFigures(self._metrics, growth)
        self._figures.show(answers, decoders)
        self._metrics.workers_seen.set_to_current_time()

    def _show(self, known: _Known) -> None:
        metrics, budgets = self._metrics, self._store.budgets
        metrics.voices.set(known.num_voices)
        metrics.deletions_unfinished.set(known.num_unfinished)
        most = {"audio": budgets.audio, "encodings": budgets.encodings}
        for segment, contents in known.usage.items():
            for content, used in contents.items():
                where = "disk", segment.value, content
                metrics.stored_bytes.labels(*where).set(used.num_bytes)
                metrics.stored_max_bytes.labels(*where).set(most[content][segment])


def pause_after(took_seconds: float) -> float:
    """Return how long to ask nobody, after it took so long."""
    pause_seconds = max(PERIOD_SECONDS, PAUSE_OF_ANSWERS * took_seconds)
    return min(pause_seconds, MAX_PERIOD_SECONDS)


def _look(catalogue: Catalogue) -> _Known:
    return _Known(
        num_voices=catalogue.count(),
        num_unfinished=catalogue.num_unfinished_deletions(),
        usage=catalogue.usage(),
    )
