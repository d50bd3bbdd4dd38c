"""A worker's cache of encodings: its memory in front of the store."""

from vllm_tts_cache.catalogue.records import Segment
from vllm_tts_cache.config import Settings
from vllm_tts_cache.errors import EncodingCorruptError, StorageError
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.store.encoding import Encoding, EncodingKey
from vllm_tts_cache.store.memory import Budget, CacheStats, Counters, MemoryTier
from vllm_tts_cache.store.speaker_store import SpeakerStore


class EncodingCache:
    """Encodings in this process's memory, and in the store behind it.

    This class decides that a disk that fails costs a request time, and never fails it.

    Attributes:
        memory: Encodings in memory; refuses those deleted while they were read or made.
    """

    def __init__(self, memory: MemoryTier, store: SpeakerStore):
        self.memory = memory
        self._store = store
        self._counters = Counters()
        self._hits = Counters()
        self._log = ThrottledLog()

    def get(self, key: EncodingKey, segment: Segment) -> Encoding | None:
        """Return the encoding, from memory or else from this disk; None on a miss."""
        if (encoding := self.memory.get(key, segment)) is not None:
            self._hits.add("memory")
            return encoding
        since = self.memory.num_deletes
        try:
            encoding = self._store.read_here(key)
        except StorageError as exc:
            self._count_error(exc)
        if encoding is None:
            self._counters.add("misses")
            return None
        self._hits.add("disk")
        self.memory.put(key, encoding, segment, since=since)
        return encoding

    def put(self, key: EncodingKey, encoding: Encoding, segment: Segment) -> bool:
        """Publish the encoding and keep it in memory; False if neither has it.

        If its audio was deleted neither keeps it; if the disk fails only memory does.
        """
        since, is_stored = self.memory.num_deletes, True
        try:
            if not self._store.writer.publish(key, encoding):
                return False
        except StorageError as exc:
            self._count_error(exc)
            # Only the memory can say whether the audio was deleted meanwhile.
            since, is_stored = self.memory.oldest_known_delete, False
        return self.memory.put(key, encoding, segment, since=since) or is_stored

    def load(self, key: EncodingKey, segment: Segment) -> bool:
        """Bring a stored encoding into memory or else onto this disk; False if neither.

        It may wait for an object store, and counts neither a hit nor a miss.
        """
        if self.memory.contains(key):
            return True
        since = self.memory.num_deletes
        try:
            encoding = self._store.read(key)
        except StorageError as exc:
            self._count_error(exc)
            return False
        return encoding is not None and (
            self.memory.put(key, encoding, segment, since=since) or self.is_stored(key)
        )

    def is_stored(self, key: EncodingKey) -> bool:
        """Whether the disk, which outlives the process, has the encoding.

        One ``stat``, no query, no lock.
        """
        try:
            return self._store.files.exists(key.audio_sha256, key.encoder_fingerprint)
        except StorageError as exc:
            self._count_error(exc)
            return False

    def stats(self) -> CacheStats:
        """Return the counts since the start, and what the memory holds now."""
        counts, hits = self._counters.snapshot(), self._hits.snapshot()
        return CacheStats(
            hits={name: hits[name] for name in ("memory", "disk")},
            misses=counts["misses"],
            corrupt=counts["corrupt"],
            tier_errors=counts["tier_errors"],
            memory=self.memory.stats(),
        )

    def _count_error(self, error: StorageError) -> None:
        if isinstance(error, EncodingCorruptError):
            self._counters.add("corrupt")
            self._log.warn_of("corrupt encoding", "%s; it is made again", error)
        else:
            self._counters.add("tier_errors")
            self._log.warn_of("stored encodings", "The store failed: %s", error)


def open_cache(settings: Settings, store: SpeakerStore) -> EncodingCache:
    """Open a worker's cache with the memory budgets of the settings."""
    share, max_bytes = settings.inline_share, settings.memory_max_bytes
    inline = Budget(int(max_bytes * share), int(settings.memory_max_entries * share))
    inline_entries = inline.max_entries or 0
    registered = Budget(
        max_bytes - inline.max_bytes, settings.memory_max_entries - inline_entries
    )
    budgets = {Segment.REGISTERED: registered, Segment.INLINE: inline}
    return EncodingCache(MemoryTier(budgets), store)
