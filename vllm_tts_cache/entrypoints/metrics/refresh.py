"""Brings the series up to date in the background, so that a scrape only reads them."""

import asyncio
import os
import time
from collections import Counter as Tally
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path

from prometheus_client import Counter

from vllm_tts_cache.entrypoints.metrics.series import Metrics
from vllm_tts_cache.entrypoints.speakers.executors import BoundedExecutor
from vllm_tts_cache.entrypoints.speakers.served_model import Decoders
from vllm_tts_cache.errors import log_text_of
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.speaker import wire
from vllm_tts_cache.speaker.rpc_client import STATS, AsyncWorkers, UnsupportedModelError
from vllm_tts_cache.store.locks import claim
from vllm_tts_cache.store.speaker_store import SpeakerStore

_LOCK_NAME = "vllm-tts-cache.lock"

throttled = ThrottledLog()

PERIOD_SECONDS = 5.0
# A talker answers between two steps, a diffusion model between two batches, and the
# host hands on no request meanwhile: a pause is this many times as long as a refresh.
PAUSE_OF_ANSWERS = 20
MAX_PERIOD_SECONDS = 60.0


class Turn:
    """The right of one API process to show what the workers and the catalogue say.

    With ``--api-server-count`` above 1 the host adds up what all API processes have
    written into one ``directory``, so the lock is a file there. The process that has it
    keeps it until it ends.

    Attributes:
        is_first: Whether no process had the turn before: else the counts of a process
            that had it stay in the directory, and are shown.
    """

    def __init__(self, directory: Path | None):
        self._directory = directory
        self._handle: int | None = None
        self.is_first = True

    def is_ours(self) -> bool:
        """Take the turn if no process has it; return whether this process has it.

        Raises: OSError.
        """
        if self._directory is None or self._handle is not None:
            return True
        path = self._directory / _LOCK_NAME
        path.touch(0o600)
        if (handle := claim(path)) is None:
            return False
        self._handle = handle
        self.is_first = path.stat().st_size == 0
        path.write_bytes(b"taken\n")
        return True

    def close(self) -> None:
        """Give the turn up to another process."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


class Growth:
    """Turns counts since a worker's start into what was added since the last refresh.

    Args:
        is_first: Whether no process has shown the counts before; else those of the
            first refresh are taken as shown.
    """

    def __init__(self, *, is_first: bool):
        self._shown: dict[Hashable, float] = {}
        self._is_shown_already = not is_first

    def of(self, total: float, *name: Hashable) -> float:
        """Return how much the count of this name has grown."""
        before = self._shown.get(name, total if self._is_shown_already else 0)
        self._shown[name] = total
        return max(0, total - before)

    def end_look(self) -> None:
        """End a refresh: a count that first appears in a later one grows from 0."""
        self._is_shown_already = False


class WorkerFigures:
    """Adds what the workers counted to the series, each count once.

    The ranks of a tensor-parallel worker look the same encodings up, so only rank 0's
    counts are added; memory is added up over all ranks.
    """

    def __init__(self, metrics: Metrics, growth: Growth):
        self._metrics = metrics
        self._growth = growth

    def show(
        self,
        answers: Sequence[wire.WorkerStats],
        decoders: Sequence[wire.DecoderStats] = (),
    ) -> None:
        """Update the series by the answers of all workers, and of decoders' workers."""
        metrics = self._metrics
        first = [answer for answer in answers if answer.rank == 0]
        for answer in first:
            self._add(answer.worker_id, self._counts(answer.stats))
            for each in answer.encode_times:
                labels = each.encoder, each.segment
                encode = metrics.encode_seconds.labels(*labels)
                encode.add(self._grown(each.encode, answer.worker_id, encode))
                queue = metrics.encode_queue_seconds.labels(*labels)
                queue.add(self._grown(each.queue, answer.worker_id, queue))
        for decoder in decoders:
            counts = {
                metrics.decoder_states.labels("hit"): decoder.hits,
                metrics.decoder_states.labels("made"): decoder.made,
                metrics.evictions.labels("decoder", "registered"): decoder.evictions,
            }
            self._add(decoder.worker_id, counts)
        self._growth.end_look()
        held = [answer.stats.tiers["memory"].segments for answer in answers]
        used = _summed({s.value: h.bytes for s, h in each.items()} for each in held)
        most = _summed({s.value: h.max_bytes for s, h in each.items()} for each in held)
        for segment in used:
            where = "memory", segment, "encodings"
            metrics.stored_bytes.labels(*where).set(used[segment])
            metrics.stored_max_bytes.labels(*where).set(most[segment])
        if decoders:
            where = "decoder", "registered", "states"
            metrics.stored_bytes.labels(*where).set(sum(d.bytes for d in decoders))
            max_bytes = sum(decoder.max_bytes for decoder in decoders)
            metrics.stored_max_bytes.labels(*where).set(max_bytes)
        metrics.encodes_in_flight.set(sum(a.stats.in_flight for a in first))
        for lane, number in _summed(a.stats.waiting for a in first).items():
            metrics.encodes_waiting.labels(lane).set(number)

    def _counts(self, stats: wire.SpeakerStats) -> dict[Counter, int]:
        metrics = self._metrics
        memory = stats.tiers["memory"].segments.items()
        labelled = {
            metrics.hits: {(tier,): n for tier, n in stats.hits.items()},
            metrics.bucket_objects: {(of,): n for of, n in stats.bucket.items()},
            metrics.encodes: {
                **{(of, "done"): n for of, n in stats.encodes.items()},
                **{(of, "failed"): n for of, n in stats.failed_encodes.items()},
            },
            metrics.evictions: {
                **{("memory", of.value): held.evictions for of, held in memory},
                **{("disk", of): n for of, n in stats.disk_evictions.items()},
            },
        }
        return {
            metrics.misses: stats.misses,
            metrics.corrupt: stats.corrupt,
            metrics.disk_errors: stats.tier_errors,
            metrics.prompts: stats.prompts,
            metrics.prompts_failed: stats.failed_prompts,
            **{
                counter.labels(*labels): number
                for counter, numbers in labelled.items()
                for labels, number in numbers.items()
            },
        }

    def _add(self, worker: str, counts: Mapping[Counter, int]) -> None:
        for counter, total in counts.items():
            counter.inc(self._growth.of(total, worker, counter))

    def _grown(self, durations: wire.Durations, *name: Hashable) -> wire.Durations:
        counts = [
            int(self._growth.of(number, *name, bucket))
            for bucket, number in enumerate(durations.counts)
        ]
        total = self._growth.of(durations.total_seconds, *name, "total")
        return wire.Durations(counts=counts, total_seconds=total)


def _summed(numbers: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Tally[str] = Tally()
    for each in numbers:
        total.update(each)
    return dict(total)


class MetricsRefresh:
    """Reads every few seconds what the API process does not count itself.

    For the event loop only.

    Args:
        workers: Returns the workers; None if the served model has none.
        num_pending: Returns how many encodings this process waits for.
        shared_with: The directory of the host's API processes, if there are several.
    """

    def __init__(
        self,
        metrics: Metrics,
        store: SpeakerStore,
        workers: Callable[[], AsyncWorkers | None],
        decoders: Decoders,
        num_pending: Callable[[], int],
        shared_with: Path | None,
    ):
        self._metrics = metrics
        self._store = store
        self._workers = workers
        self._decoders = decoders
        self._num_pending = num_pending
        self._turn = Turn(shared_with)
        self._figures: WorkerFigures | None = None
        self._own_growth = Growth(is_first=True)
        self._threads = BoundedExecutor("metrics", num_threads=1, max_waiting=1)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start refreshing; needs a running event loop."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def shutdown(self) -> None:
        """Stop; another API process takes the turn."""
        if self._task is not None:
            self._task.cancel()
        self._threads.shutdown()
        self._turn.close()

    async def refresh(self) -> None:
        """Bring all series up to date. Raises: TTSCacheError, OSError."""
        self._metrics.encodings_awaited.set(self._num_pending())
        for segment, number in self._store.writer.evictions.snapshot().items():
            growth = self._own_growth.of(number, segment)
            self._metrics.evictions.labels("disk", segment).inc(growth)
        if not self._turn.is_ours():
            return
        await self._threads.run(self._show_catalogue)
        await self._show_workers()

    async def _run(self) -> None:
        pause_seconds = PERIOD_SECONDS
        while True:
            await asyncio.sleep(pause_seconds)
            began_at = time.monotonic()
            try:
                await self.refresh()
            except Exception as exc:  # noqa: BLE001  the next may succeed
                reason = log_text_of(exc)
                throttled.warn_of("metrics", "Metrics are not refreshed: %s", reason)
            took_seconds = time.monotonic() - began_at
            pause_seconds = max(PERIOD_SECONDS, PAUSE_OF_ANSWERS * took_seconds)
            pause_seconds = min(pause_seconds, MAX_PERIOD_SECONDS)

    async def _show_workers(self) -> None:
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

    def _show_catalogue(self) -> None:
        """Show the catalogue's counts, once all of them are read; for a thread."""
        metrics, store = self._metrics, self._store
        num_voices, usage = store.num_speakers(), store.usage()
        budgets = store.writer.budgets
        metrics.deletions_unfinished.set(store.num_unfinished_deletions())
        metrics.voices.set(num_voices)
        for segment, contents in usage.items():
            for content, used in contents.items():
                where = "disk", segment.value, content
                metrics.stored_bytes.labels(*where).set(used.num_bytes)
                max_bytes = budgets[segment, content == "audio"]
                metrics.stored_max_bytes.labels(*where).set(max_bytes)
