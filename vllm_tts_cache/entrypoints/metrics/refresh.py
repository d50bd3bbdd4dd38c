"""Brings the series up to date in the background, so that a scrape only reads them.

Of several API processes one shows what all of them would be told alike.
"""

import asyncio
import fcntl
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_tts_cache.catalogue.records import Segment
from vllm_tts_cache.catalogue.stored_files import Usage
from vllm_tts_cache.entrypoints.metrics.series import Metrics
from vllm_tts_cache.entrypoints.speakers.executors import BoundedExecutor
from vllm_tts_cache.entrypoints.speakers.served_model import Decoders
from vllm_tts_cache.errors import log_text_of
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.speaker.rpc_client import (
    STATS,
    AsyncWorkers,
    UnsupportedModelError,
)
from vllm_tts_cache.speaker.wire import (
    DecoderStats,
    Durations,
    EncodeTimes,
    SpeakerStats,
    WorkerStats,
)
from vllm_tts_cache.store.speaker_store import SpeakerStore

_LOCK_NAME = "vllm-tts-cache.lock"

throttled = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))

PERIOD_SECONDS = 5.0
# A talker answers between two steps, a diffusion model between two batches, and the
# host hands on no request meanwhile: asking takes one part in so many of the time.
PAUSE_OF_ANSWERS = 20
MAX_PERIOD_SECONDS = 60.0


class Turn:
    """The right to show what the workers and the catalogue say.

    With ``--api-server-count`` above 1 the host adds up what all API processes have
    written into one directory. So the lock is a file there: it is shared by just those
    whose counts are added up. Whoever holds it keeps it until it ends.

    Args:
        directory: That directory; None where there is one process.
    """

    def __init__(self, directory: Path | None):
        self._path = None if directory is None else directory / _LOCK_NAME
        self._handle: int | None = None
        self._is_ours = directory is None
        self.is_first = True

    def is_ours(self) -> bool:
        """Tell whether this process is the one, taking the turn if nobody has it.

        Afterwards ``is_first`` tells whether nobody had it before: else what was
        counted so far has been shown, and stays in the directory.

        Raises: OSError.
        """
        if not self._is_ours:
            self._is_ours = self._take()
        return self._is_ours

    def close(self) -> None:
        """Leave it to the others."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
            self._is_ours = False

    def _take(self) -> bool:
        assert self._path is not None
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.is_first = os.fstat(handle).st_size == 0
            os.write(handle, b"taken\n")
        except BlockingIOError:
            os.close(handle)
            return False
        except BaseException:
            os.close(handle)
            raise
        self._handle = handle
        return True


class Growth:
    """Turns counts since a worker's start into what was added since the last look.

    Args:
        is_first: Whether nobody has shown them before; else those that are there at
            the first look are taken as shown.
    """

    def __init__(self, *, is_first: bool):
        self._shown: dict[tuple[str, ...], float] = {}
        self._is_shown_already = not is_first

    def of(self, total: float, *name: str) -> float:
        """Return how much the count of this name has grown."""
        before = self._shown.get(name, total if self._is_shown_already else 0)
        self._shown[name] = total
        return max(0, total - before)

    def end_look(self) -> None:
        """Take what appears from now on as new."""
        self._is_shown_already = False


class WorkerFigures:
    """Adds what the workers counted to the series, each count once.

    The ranks of a tensor-parallel worker look the same encodings up, so rank 0 counts
    for all of them; its memory each of them has.
    """

    def __init__(self, metrics: Metrics, growth: Growth):
        self._metrics = metrics
        self._growth = growth

    def show(
        self, answers: Sequence[WorkerStats], decoders: Sequence[DecoderStats] = ()
    ) -> None:
        """Take in what all workers answered, and those of a decoder."""
        first = [answer for answer in answers if answer.rank == 0]
        for answer in first:
            self._count(answer.worker_id, answer.stats)
            self._count_evictions(answer.worker_id, answer.stats)
            self._time(answer.worker_id, answer.encode_times)
        if decoders:
            self._show_decoders(decoders)
        self._growth.end_look()
        self._measure([answer.stats for answer in answers])
        encoding = [answer.stats for answer in first]
        self._metrics.encodes_in_flight.set(sum(s.in_flight for s in encoding))
        for lane, number in _summed(s.waiting for s in encoding).items():
            self._metrics.encodes_waiting.labels(lane).set(number)

    def _show_decoders(self, answers: Sequence[DecoderStats]) -> None:
        for told in answers:
            for outcome, number in (("hit", told.hits), ("made", told.made)):
                growth = self._growth.of(number, told.worker_id, "states", outcome)
                self._metrics.decoder_states.labels(outcome).inc(growth)
            growth = self._growth.of(told.evictions, told.worker_id, "states")
            self._metrics.evictions.labels("decoder", "registered").inc(growth)
        where = "decoder", "registered", "states"
        metrics = self._metrics
        metrics.stored_bytes.labels(*where).set(sum(told.bytes for told in answers))
        most = sum(told.max_bytes for told in answers)
        metrics.stored_max_bytes.labels(*where).set(most)

    def _count(self, worker: str, stats: SpeakerStats) -> None:
        metrics, grown = self._metrics, self._growth.of
        for tier, number in stats.hits.items():
            metrics.hits.labels(tier).inc(grown(number, worker, "hits", tier))
        metrics.misses.inc(grown(stats.misses, worker, "misses"))
        metrics.corrupt.inc(grown(stats.corrupt, worker, "corrupt"))
        metrics.disk_errors.inc(grown(stats.tier_errors, worker, "errors"))
        metrics.prompts.inc(grown(stats.prompts, worker, "prompts"))
        metrics.prompts_failed.inc(grown(stats.failed_prompts, worker, "failed"))
        for outcome, number in stats.bucket.items():
            growth = grown(number, worker, "bucket", outcome)
            metrics.bucket_objects.labels(outcome).inc(growth)
        ended = {"done": stats.encodes, "failed": stats.failed_encodes}
        for outcome, numbers in ended.items():
            for encoder, number in numbers.items():
                growth = grown(number, worker, "encodes", encoder, outcome)
                metrics.encodes.labels(encoder, outcome).inc(growth)

    def _count_evictions(self, worker: str, stats: SpeakerStats) -> None:
        memory = stats.tiers["memory"].segments
        evicted = {
            "memory": {of.value: held.evictions for of, held in memory.items()},
            "disk": stats.disk_evictions,
        }
        for tier, numbers in evicted.items():
            for segment, number in numbers.items():
                growth = self._growth.of(number, worker, "evictions", tier, segment)
                self._metrics.evictions.labels(tier, segment).inc(growth)

    def _time(self, worker: str, times: Iterable[EncodeTimes]) -> None:
        for each in times:
            name = worker, each.encoder, each.segment
            labels = each.encoder, each.segment
            self._metrics.encode_seconds.labels(*labels).add(
                self._grown(each.encode, *name, "encode")
            )
            self._metrics.encode_queue_seconds.labels(*labels).add(
                self._grown(each.queue, *name, "queue")
            )

    def _grown(self, durations: Durations, *name: str) -> Durations:
        counts = [
            int(self._growth.of(number, *name, str(bucket)))
            for bucket, number in enumerate(durations.counts)
        ]
        total = self._growth.of(durations.total_seconds, *name, "total")
        return Durations(counts=counts, total_seconds=total)

    def _measure(self, workers: list[SpeakerStats]) -> None:
        held = [stats.tiers["memory"].segments for stats in workers]
        used = _summed({s.value: h.bytes for s, h in each.items()} for each in held)
        most = _summed({s.value: h.max_bytes for s, h in each.items()} for each in held)
        for segment, num_bytes in used.items():
            where = "memory", segment, "encodings"
            self._metrics.stored_bytes.labels(*where).set(num_bytes)
            self._metrics.stored_max_bytes.labels(*where).set(most[segment])


def _summed(numbers: Iterable[dict[str, int]]) -> dict[str, int]:
    total: defaultdict[str, int] = defaultdict(int)
    for each in numbers:
        for name, number in each.items():
            total[name] += number
    return total


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
        for segment, number in self._store.writer.evictions.snapshot().items():
            growth = self._own.of(number, segment)
            self._metrics.evictions.labels("disk", segment).inc(growth)
        if not self._turn.is_ours():
            return
        self._show(await self._threads.run(_look, self._store))
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
        metrics, budgets = self._metrics, self._store.writer.budgets
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


def _look(store: SpeakerStore) -> _Known:
    return _Known(
        num_voices=store.num_speakers(),
        num_unfinished=store.num_unfinished_deletions(),
        usage=store.usage(),
    )
