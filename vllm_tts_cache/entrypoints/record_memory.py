"""Rows of speakers that an API server remembers, where reading one asks a database."""

import time
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from vllm_tts_cache.catalogue.record import SpeakerRecord
from vllm_tts_cache.store.speaker_store import Found

# A row takes 1 to 2 KB, with a long transcript some more.
MAX_SPEAKERS = 8192
# Of an embedding of 2048 numbers 64 KB.
MAX_EMBEDDINGS = 256

_Key = tuple[str, str]


def boot_seconds() -> float:
    """A clock that goes on while the machine is suspended, where there is one."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


@dataclass(slots=True)
class RecordCounts:
    """How often a speaker was looked up, and for how many of these in the catalogue."""

    remembered: int = 0
    read: int = 0


class RecordMemory:
    """Speakers by tenant and name or id; the least recently spoken ones go.

    They are good while every change of a row waits until we have heard of it, which
    `trust` says each time: then a request asks nobody, and while the database is away
    it goes on so. For the event loop only.

    Args:
        now: Unix seconds of the catalogue, by which a speaker's time ends.
        max_speakers: Remembered at most.

    Attributes:
        counts: What look-ups came to.
    """

    def __init__(self, now: Callable[[], float], max_speakers: int = MAX_SPEAKERS):
        self._now = now
        self._max_speakers = max_speakers
        self._found: OrderedDict[_Key, Found] = OrderedDict()
        self._keys: defaultdict[str, set[_Key]] = defaultdict(set)
        self._embeddings: OrderedDict[str, tuple[int, tuple[float, ...]]]
        self._embeddings = OrderedDict()
        self._num_deletes = 0
        self._trusted_until = 0.0
        self.counts = RecordCounts()

    def __len__(self) -> int:
        return len(self._found)

    @property
    def is_current(self) -> bool:
        """Whether what is remembered is what the catalogue says."""
        return boot_seconds() < self._trusted_until

    def trust(self, until: float) -> None:
        """What is remembered stays true until then, by `boot_seconds`."""
        self._trusted_until = until

    async def find(
        self, tenant: str, name: str, read: Callable[[], Awaitable[Found | None]]
    ) -> Found | None:
        """Return a tenant's speaker, read only if it is not remembered.

        Raises: whatever ``read`` raises.
        """
        key = (tenant, name)
        known = self._found.get(key) if self.is_current else None
        if known is not None and not known.record.has_expired(self._now()):
            self._found.move_to_end(key)
            self.counts.remembered += 1
            return known
        num_deletes = self._num_deletes
        self.counts.read += 1
        found = await read()
        # Else a row would be kept that has changed since it was read.
        if found is not None and self.is_current and num_deletes == self._num_deletes:
            self._keep(key, found)
        return found

    async def embedding(
        self,
        record: SpeakerRecord,
        read: Callable[[], Awaitable[tuple[float, ...] | None]],
    ) -> tuple[float, ...] | None:
        """Return a speaker's embedding, read only if it is not remembered.

        Raises: whatever ``read`` raises.
        """
        generation, known = self._embeddings.get(record.speaker_id, (None, None))
        if self.is_current and generation == record.generation:
            return known
        num_deletes = self._num_deletes
        embedding = await read()
        is_kept = self.is_current and num_deletes == self._num_deletes
        if embedding is not None and is_kept:
            self._embeddings[record.speaker_id] = record.generation, embedding
            if len(self._embeddings) > MAX_EMBEDDINGS:
                self._embeddings.popitem(last=False)
        return embedding

    def delete(self, speaker_id: str) -> None:
        """Delete a speaker, whatever it was called; what is being read is not kept."""
        self._num_deletes += 1
        self._embeddings.pop(speaker_id, None)
        for key in self._keys.pop(speaker_id, ()):
            del self._found[key]

    def delete_all(self) -> None:
        """Delete all; what is being read is not kept."""
        self._num_deletes += 1
        for each in (self._found, self._keys, self._embeddings):
            each.clear()

    def _keep(self, key: _Key, found: Found) -> None:
        if (known := self._found.get(key)) is not None:
            self._delete_name(key, known)
        self._found[key] = found
        self._keys[found.record.speaker_id].add(key)
        if len(self._found) > self._max_speakers:
            self._delete_name(*next(iter(self._found.items())))

    def _delete_name(self, key: _Key, found: Found) -> None:
        del self._found[key]
        keys = self._keys[found.record.speaker_id]
        keys.discard(key)
        if not keys:
            del self._keys[found.record.speaker_id]
