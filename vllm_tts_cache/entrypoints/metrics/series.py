"""Every Prometheus series of ours: its name, its labels and what it means.

The prefix has no colon, unlike the host's ``vllm:`` and ``vllm_omni:``: Prometheus
keeps it for recording rules, and vLLM unregisters whatever begins with ``vllm:`` when
an engine starts.

Labels take few values, none of them from a client: no name, text or address of a voice.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from fastapi.exceptions import HTTPException
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from vllm_tts_cache.errors import SpeakerRequestError, TTSCacheError
from vllm_tts_cache.speaker.wire import DURATION_BOUNDS_SECONDS, Durations

_NAMESPACE = "vllm_tts_cache"
PREFIX = f"{_NAMESPACE}_"

OUTCOMES = ("hit", "miss", "none", "failed")
# FastAPI raises its HTTPException for a body that is no form.
_CLIENTS_ERRORS = (SpeakerRequestError, HTTPException)


class AddedHistogram(Histogram):
    """A histogram of observations that were counted in another process."""

    def add(self, durations: Durations) -> None:
        """Add further observations, counted in buckets of the same bounds."""
        for bucket, number in zip(self._buckets, durations.counts, strict=True):
            bucket.inc(number)
        self._sum.inc(durations.total_seconds)


@dataclass(slots=True)
class CountedRequest:
    """A speech request while its speaker is resolved.

    Attributes:
        outcome: ``hit``, ``miss`` or ``none``, once it is known.
    """

    outcome: str = "none"


class Metrics:
    """The series of one process.

    Several API processes each count for themselves, and the host adds their counts up.
    One of them shows the series of workers and catalogue, see `refresh.Turn`.

    Args:
        registry: Where the series are registered; the host serves prometheus_client's.
    """

    def __init__(self, registry: CollectorRegistry):
        ours: dict[str, Any] = {"namespace": _NAMESPACE, "registry": registry}
        counter = partial(Counter, **ours)
        histogram = partial(AddedHistogram, **ours, buckets=DURATION_BOUNDS_SECONDS)
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
