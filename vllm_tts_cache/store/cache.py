"""Memory before files: the one way in which a worker reads or writes encodings."""

import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from vllm_tts_cache.catalogue.records import Segment
from vllm_tts_cache.config import Settings
from vllm_tts_cache.errors import EncodingCorruptError, StorageError
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.store.encoding import Encoding, EncodingKey
from vllm_tts_cache.store.memory import Budget, CacheStats, Counters, MemoryTier
from vllm_tts_cache.store.speaker_store import SpeakerStore

P = ParamSpec("P")
T = TypeVar("T")


class EncodingCache:
    """Encodings in this process's memory, and behind it in the store.

    A disk that fails costs time, never a request; this class is where that is
    decided.
    """

    def __init__(self, memory: MemoryTier, store: SpeakerStore):
        self._memory = memory
        self._store = store
        self._counters = Counters()
        self._hits = Counters()
        self._log = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))

    def get(self, key: EncodingKey, segment: Segment) -> Encoding | None:
        """Return the encoding, from memory or else from this disk; None on a miss."""
        if (encoding := self._memory.get(key, segment)) is not None:
            self._hits.add("memory")
            return encoding
        since = self._memory.num_deletes
        if (encoding := self._attempt(self._store.read_here, key)) is None:
            self._counters.add("misses")
            return None
        self._hits.add("disk")
        self._memory.put(key, encoding, segment, since=since)
        return encoding

    def put(self, key: EncodingKey, encoding: Encoding, segment: Segment) -> None:
        """Publish the encoding and keep it in memory.

        If its audio was deleted neither has it; if the disk fails memory has it.
        """
        since = self._memory.num_deletes
        # None: the disk failed, and only the memory can say whether the audio was
        # deleted while it was encoded.
        published = self._attempt(self._store.publish, key, encoding)
        if published is None:
            since = self._memory.oldest_known_delete
        if published is not False:
            self._memory.put(key, encoding, segment, since=since)

    def load(self, key: EncodingKey, segment: Segment) -> bool:
        """Have a stored encoding in memory before it is asked for; no hit, no miss.

        It may take as long as an object store does. False if it is not stored.
        """
        if self._memory.contains(key):
            return True
        since = self._memory.num_deletes
        if (encoding := self._attempt(self._store.read, key)) is None:
            return False
        self._memory.put(key, encoding, segment, since=since)
        return True

    def contains(self, key: EncodingKey) -> bool:
        """Whether memory or disk has the encoding; nothing is read or moved."""
        return self._memory.contains(key) or self.is_stored(key)

    def is_stored(self, key: EncodingKey) -> bool:
        """Whether the disk, which outlives the process, has the encoding."""
        return bool(self._attempt(self._store.is_stored, key))

    def delete(self, audio_sha256: str) -> int:
        """Delete an audio's encodings from memory; return how many there were.

        What is being read or made of it now will not be kept in memory either.
        """
        return self._memory.delete(audio_sha256)

    def delete_all(self) -> int:
        """Delete all from memory, as `delete` does one; return how many there were."""
        return self._memory.delete_all()

    def stats(self) -> CacheStats:
        """Return the counts since the start, and what the memory holds now."""
        counts, hits = self._counters.snapshot(), self._hits.snapshot()
        return CacheStats(
            hits={name: hits[name] for name in ("memory", "disk")},
            misses=counts["misses"],
            corrupt=counts["corrupt"],
            tier_errors=counts["tier_errors"],
            memory=self._memory.stats(),
        )

    def _attempt(
        self, action: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        try:
            return action(*args, **kwargs)
        except EncodingCorruptError as exc:
            self._counters.add("corrupt")
            self._log.warn_of("corrupt encoding", "A stored encoding: %s", exc)
        except StorageError as exc:
            self._counters.add("tier_errors")
            self._log.warn_of("stored encodings", "Stored encodings: %s", exc)
        return None


def open_cache(settings: Settings, store: SpeakerStore) -> EncodingCache:
    """A worker's cache: as much memory as the settings say, and the store."""
    share, max_bytes = settings.inline_share, settings.memory_max_bytes
    inline = Budget(int(max_bytes * share), int(settings.memory_max_entries * share))
    inline_entries = inline.max_entries or 0
    registered = Budget(
        max_bytes - inline.max_bytes, settings.memory_max_entries - inline_entries
    )
    budgets = {Segment.REGISTERED: registered, Segment.INLINE: inline}
    return EncodingCache(MemoryTier(budgets), store)
