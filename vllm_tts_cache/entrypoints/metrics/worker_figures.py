"""What the workers' answers add to the series."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from vllm_tts_cache.entrypoints.metrics.series import Metrics
from vllm_tts_cache.speaker.wire import (
    DecoderStats,
    Durations,
    EncodeTimes,
    SpeakerStats,
    WorkerStats,
)


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
