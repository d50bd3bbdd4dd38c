"""What an API process shows to Prometheus, at the host's own ``/metrics``.

Requests count while they run; what workers and the catalogue say is brought up to date
in the background, so that a scrape only reads.

The prefix has no colon, unlike the host's ``vllm:`` and ``vllm_omni:``: Prometheus
keeps it for recording rules, and vLLM unregisters whatever begins with ``vllm:`` when
an engine starts.

Labels take few values, none of them from a client: no name, text or address of a voice.
"""

import asyncio
import os
import time
from collections import Counter as Tally
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from fastapi.exceptions import HTTPException
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from vllm_tts_cache.entrypoints.speakers.executors import BoundedExecutor
from vllm_tts_cache.entrypoints.speakers.served_model import ServedModel
from vllm_tts_cache.errors import SpeakerRequestError, TTSCacheError, log_text_of
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.speaker import wire
from vllm_tts_cache.speaker.rpc_client import (
    DECODER_STATS,
    STATS,
    AsyncWorkers,
    UnsupportedModelError,
)
from vllm_tts_cache.store.directory import claim
from vllm_tts_cache.store.speaker_store import SpeakerStore

throttled = ThrottledLog()

PERIOD_SECONDS = 5.0
# A talker answers between two steps, a diffusion model between two batches, and the
# host hands on no request meanwhile: a pause is this many times as long as a refresh.
PAUSE_OF_ANSWERS = 20
MAX_PERIOD_SECONDS = 60.0

_NAMESPACE = "vllm_tts_cache"
_LOCK_NAME = "vllm-tts-cache.lock"
PREFIX = f"{_NAMESPACE}_"

OUTCOMES = ("hit", "miss", "none", "failed")
# FastAPI raises its HTTPException for a body that is no form.
_CLIENTS_ERRORS = (SpeakerRequestError, HTTPException)


class Growth:
    """Turns counts since a worker's start into what was added since the last refresh.

    If not ``is_first``, another process has shown the counts of the first refresh.
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


class AddedHistogram(Histogram):
    """A histogram of observations that were counted in another process."""

    def add(self, durations: wire.Durations, growth: Growth, worker: str) -> None:
        """Add what a worker has counted further, in buckets of the same bounds."""
        for bucket, total in zip(self._buckets, durations.counts, strict=True):
            bucket.inc(growth.of(total, worker, bucket))
        self._sum.inc(growth.of(durations.total_seconds, worker, self._sum))


@dataclass(slots=True)
class CountedRequest:
    """A speech request while its speaker is resolved, and what it found once known."""

    outcome: str = "none"


class Metrics:
    """The series of one process.

    Several API processes each count for themselves, and the host adds their counts up.
    One of them shows the series of workers and catalogue, see `Turn`.
    """

    def __init__(self, registry: CollectorRegistry):
        ours: dict[str, Any] = {"namespace": _NAMESPACE, "registry": registry}
        counter = partial(Counter, **ours)
        histogram = partial(
            AddedHistogram, **ours, buckets=wire.DURATION_BOUNDS_SECONDS
        )
        shown = partial(Gauge, **ours, multiprocess_mode="livemostrecent")
        # What each API process counts for itself.
        self.requests = counter(
            "requests",
            "Speech requests by what their voice found: hit, all of its encodings were "
            "there; miss, it waited for some; none, it needed none; failed, it could "
            "not be had. A prompt that the engine loses is made, and counted, anew.",
            ("outcome", "family"),
        )
        self.requests_failed = counter(
            "requests_failed",
            "Speech requests whose voice could not be had, by the error's name and by "
            "who can mend it.",
            ("reason", "fault"),
        )
        self.uploads = counter(
            "uploads",
            "Registrations of voices that were asked for, refused or not, imports of "
            "bundles among them.",
        )
        self.uploads_refused = counter(
            "uploads_refused",
            "Registrations that were refused, by the error's name and by who can mend "
            "it.",
            ("reason", "fault"),
        )
        self.fetches = counter(
            "fetches",
            "References behind URLs: fetched, failed, or refused because too many are "
            "being fetched.",
            ("outcome",),
        )
        self.encodings_awaited = Gauge(
            "encodings_awaited",
            "Encodings that requests and precomputes of the API processes wait for.",
            **ours,
            multiprocess_mode="livesum",
        )
        self.evictions = counter(
            "evictions",
            "Files (disk) and encodings (memory) evicted to stay within a budget.",
            ("tier", "segment"),
        )
        # What one API process reads from the workers and the catalogue.
        self.hits = counter(
            "hits", "Encodings that workers found for prompts, by where.", ("tier",)
        )
        self.misses = counter("misses", "Encodings that workers did not find.")
        self.corrupt = counter(
            "corrupt",
            "Stored encodings that did not match their key, and are made again.",
        )
        self.disk_errors = counter(
            "disk_errors", "Times that a worker's disk could not answer."
        )
        self.bucket_objects = counter(
            "bucket_objects",
            "Files that workers fetched from the object store, did not find there "
            "(lost), or found damaged (corrupt).",
            ("outcome",),
        )
        self.decoder_states = counter(
            "decoder_states",
            "Clones whose decoder began from a state of their voice, which was stored "
            "(hit) or was made.",
            ("outcome",),
        )
        self.prompts = counter("prompts", "Requests that got their speaker prompt.")
        self.prompts_failed = counter(
            "prompts_failed",
            "Requests whose speaker prompt a worker lacked; most are sent once more.",
        )
        self.encodes = counter(
            "encodes", "Encodes that ended, done or failed.", ("encoder", "outcome")
        )
        self.encode_seconds = histogram(
            "encode_seconds",
            "How long encodes took, reading the reference included.",
            ("encoder", "lane"),
        )
        self.encode_queue_seconds = histogram(
            "encode_queue_seconds",
            "How long encodes waited for the encode thread.",
            ("encoder", "lane"),
        )
        self.encodes_in_flight = shown(
            "encodes_in_flight", "Encodes that wait in a worker, or run."
        )
        self.encodes_waiting = shown(
            "encodes_waiting", "Encodes that wait in a worker.", ("lane",)
        )
        self.stored_bytes = shown(
            "stored_bytes",
            "Bytes held in the workers' memory and on disk.",
            ("tier", "segment", "content"),
        )
        self.stored_max_bytes = shown(
            "stored_max_bytes",
            "Bytes that may be held in the workers' memory and on disk.",
            ("tier", "segment", "content"),
        )
        self.voices = shown("voices", "Registered voices.")
        self.deletions_unfinished = shown(
            "deletions_unfinished", "Deletions that are not finished."
        )
        self.workers_seen = shown(
            "workers_seen_timestamp_seconds", "When the workers were last asked."
        )
        # Begin at 0: the first event of a series that begins with it is lost to `rate`.
        for outcome in ("fetched", "failed", "refused"):
            self.fetches.labels(outcome)
        for outcome in ("fetched", "lost", "corrupt"):
            self.bucket_objects.labels(outcome)
        for tier in ("memory", "disk"):
            self.hits.labels(tier)
            for segment in ("registered", "inline"):
                self.evictions.labels(tier, segment)

    def begin_family(self, family: str) -> None:
        """Begin a family's request series at 0, before its first request."""
        for outcome in OUTCOMES:
            self.requests.labels(outcome, family)

    @contextmanager
    def request(self, family: str) -> Iterator[CountedRequest]:
        """Count a request when the block ends, but not one whose client has left."""
        counted = CountedRequest()
        try:
            yield counted
        except TTSCacheError as exc:
            self.requests.labels("failed", family).inc()
            self.requests_failed.labels(*reason_of(exc)).inc()
            raise
        self.requests.labels(counted.outcome, family).inc()


def reason_of(error: Exception) -> tuple[str, str]:
    """Return the name of an error's class, and who can mend it."""
    is_clients = isinstance(error, _CLIENTS_ERRORS)
    return type(error).__name__, "client" if is_clients else "server"


@cache
def process_metrics() -> Metrics:
    """Return this process's series, in the registry that the host serves.

    One per process: the registry refuses a second series of one name.
    """
    return Metrics(REGISTRY)


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
        """Take the turn if it is free; return whether it is ours. Raises: OSError."""
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


def _summed(numbers: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Tally[str] = Tally()
    for each in numbers:
        total.update(each)
    return dict(total)


class MetricsRefresh:
    """Reads every few seconds what the API process does not count itself.

    For the event loop only. ``workers`` returns None if the served model has none,
    ``shared_with`` is the directory of the host's API processes, if there are several.
    """

    def __init__(
        self,
        metrics: Metrics,
        store: SpeakerStore,
        workers: Callable[[], AsyncWorkers | None],
        model: ServedModel,
        num_pending: Callable[[], int],
        shared_with: Path | None,
    ):
        self._metrics = metrics
        self._store = store
        self._workers = workers
        self._model = model
        self._num_pending = num_pending
        self._turn = Turn(shared_with)
        self._growth: Growth | None = None
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
        decoders = await self._model.call_decoders(workers, DECODER_STATS)
        growth = self._growth = self._growth or Growth(is_first=self._turn.is_first)
        self._show(answers, decoders, growth)
        self._metrics.workers_seen.set_to_current_time()

    def _show(
        self,
        answers: Sequence[wire.WorkerStats],
        decoders: Sequence[wire.DecoderStats],
        growth: Growth,
    ) -> None:
        """Add what workers and decoders counted to the series, each count once.

        The ranks of a tensor-parallel worker look the same encodings up, so only rank
        0's counts are added; memory is added up over all ranks.
        """
        metrics = self._metrics
        first = [answer for answer in answers if answer.rank == 0]
        for answer in first:
            for counter, total in self._counts(answer.stats).items():
                counter.inc(growth.of(total, answer.worker_id, counter))
            for each in answer.encode_times:
                labels = each.encoder, each.segment
                encode = metrics.encode_seconds.labels(*labels)
                encode.add(each.encode, growth, answer.worker_id)
                queue = metrics.encode_queue_seconds.labels(*labels)
                queue.add(each.queue, growth, answer.worker_id)
        for decoder in decoders:
            counts = {
                metrics.decoder_states.labels("hit"): decoder.hits,
                metrics.decoder_states.labels("made"): decoder.made,
                metrics.evictions.labels("decoder", "registered"): decoder.evictions,
            }
            for counter, total in counts.items():
                counter.inc(growth.of(total, decoder.worker_id, counter))
        growth.end_look()
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
        encodes, evicted = metrics.encodes.labels, metrics.evictions.labels
        memory = stats.tiers["memory"].segments.items()
        return {
            metrics.misses: stats.misses,
            metrics.corrupt: stats.corrupt,
            metrics.disk_errors: stats.tier_errors,
            metrics.prompts: stats.prompts,
            metrics.prompts_failed: stats.failed_prompts,
            **{metrics.hits.labels(tier): n for tier, n in stats.hits.items()},
            **{metrics.bucket_objects.labels(of): n for of, n in stats.bucket.items()},
            **{encodes(of, "done"): n for of, n in stats.encodes.items()},
            **{encodes(of, "failed"): n for of, n in stats.failed_encodes.items()},
            **{evicted("memory", of.value): held.evictions for of, held in memory},
            **{evicted("disk", of): n for of, n in stats.disk_evictions.items()},
        }

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
