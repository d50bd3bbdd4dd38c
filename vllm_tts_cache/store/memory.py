"""Encodings in this process's memory, bounded in bytes and in entries."""

import sys
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Mapping

from vllm_tts_cache.catalogue.record import Segment
from vllm_tts_cache.store.encoding import Encoding, EncodingKey
from vllm_tts_cache.store.shelf import Shelf
from vllm_tts_cache.store.stats import Budget, Held, TierStats

# Python 3.11 looks a member of an enum up in Python, which a hit can feel.
_REGISTERED = Segment.REGISTERED

# Addresses that were deleted, kept for writes that began before.
_MAX_DELETED = 4096


_Shelf = Shelf[EncodingKey, Encoding]


class MemoryTier:
    """Least-recently-used encodings per segment.

    Each segment has its own budget, so no amount of inline traffic can push a
    registered speaker out. Any thread may call any method.
    """

    def __init__(self, budgets: Mapping[Segment, Budget]):
        self._registered = _Shelf(budgets[Segment.REGISTERED])
        self._inline = _Shelf(budgets[Segment.INLINE])
        # As many as the catalogue lets be pinned; see `pin`.
        self._pinned = _Shelf(Budget(sys.maxsize, None))
        self._pinned_audios: frozenset[str] = frozenset()
        self._by_audio: defaultdict[str, set[EncodingKey]] = defaultdict(set)
        self._deleted: OrderedDict[str, int] = OrderedDict()
        self._num_deletes = 0
        self._oldest_known = 0
        self._lock = threading.Lock()

    @property
    def num_deletes(self) -> int:
        """How often something was deleted: ask before reading what you will put."""
        return self._num_deletes

    @property
    def oldest_known_delete(self) -> int:
        """The number from which on it is known what was deleted."""
        return self._oldest_known

    def get(self, key: EncodingKey, segment: Segment) -> Encoding | None:
        """Return the encoding and mark it recently used."""
        with self._lock:
            # Most of what is asked for is here, and every look costs a hash.
            encoding = self._registered.entries.get(key)
            if encoding is not None:
                self._registered.entries.move_to_end(key)
            elif (encoding := self._pinned.entries.get(key)) is not None:
                pass  # nothing is evicted there, so the order says nothing
            elif (encoding := self._inline.entries.get(key)) is not None:
                self._inline.entries.move_to_end(key)
                if segment is _REGISTERED:
                    self._promote(key)
            traffic = self._shelf(segment).traffic
            if encoding is None:
                traffic.misses += 1
            else:
                traffic.hits += 1
            return encoding

    def put(
        self, key: EncodingKey, encoding: Encoding, segment: Segment, *, since: int
    ) -> None:
        """Keep the encoding, evicting the oldest ones; skip one that cannot fit.

        Args:
            key: Of the encoding.
            encoding: What is kept.
            segment: Whose budget it counts against.
            since: `num_deletes` from before it was read or made; if its audio was
                deleted after that, it is not kept.
        """
        with self._lock:
            if self._was_deleted(key.audio_sha256, since):
                return
            if (shelf := self._holder(key)) is None:
                self._add(self._shelf_of(key, segment), key, encoding)
                return
            # One key, one value: what is there already is what was given.
            shelf.entries.move_to_end(key)
            if segment is Segment.REGISTERED and shelf is self._inline:
                self._promote(key)

    def pin(self, audio_sha256s: frozenset[str]) -> None:
        """Evict nothing of these audios from now on, and of others again.

        They count against no budget: who pins says how many there may be.
        """
        with self._lock:
            before, self._pinned_audios = self._pinned_audios, audio_sha256s
            for sha in before ^ audio_sha256s:
                for key in list(self._by_audio.get(sha, ())):
                    self._move(key)

    def contains(self, key: EncodingKey) -> bool:
        """Whether the encoding is here; it does not count as a use."""
        with self._lock:
            return self._holder(key) is not None

    def delete(self, audio_sha256: str) -> int:
        """Delete every encoding of one audio, without looking at the others."""
        with self._lock:
            self._remember_deleted(audio_sha256)
            keys = self._by_audio.pop(audio_sha256, set())
            for key in keys:
                if (shelf := self._holder(key)) is not None:
                    shelf.remove(key)
            return len(keys)

    def delete_all(self) -> int:
        """Delete every encoding, and keep none that is being read or made by now."""
        with self._lock:
            self._num_deletes += 1
            self._oldest_known = self._num_deletes
            self._deleted.clear()
            self._by_audio.clear()
            shelves = self._registered, self._inline, self._pinned
            return sum(shelf.clear() for shelf in shelves)

    def stats(self) -> TierStats:
        """Return what is held now and how it was used since the start."""
        with self._lock:
            segments = {segment: self._shelf(segment).stats() for segment in Segment}
            pinned = Held(len(self._pinned.entries), self._pinned.num_bytes)
        return TierStats.of(segments, pinned)

    def _was_deleted(self, audio_sha256: str, since: int) -> bool:
        known = self._deleted.get(audio_sha256, 0)
        # Of what was deleted longer ago than is known, it may have been.
        return known > since or self._oldest_known > since

    def _remember_deleted(self, audio_sha256: str) -> None:
        self._num_deletes += 1
        self._deleted[audio_sha256] = self._num_deletes
        self._deleted.move_to_end(audio_sha256)
        if len(self._deleted) > _MAX_DELETED:
            _, self._oldest_known = self._deleted.popitem(last=False)

    def _shelf(self, segment: Segment) -> _Shelf:
        return self._registered if segment is _REGISTERED else self._inline

    def _shelf_of(self, key: EncodingKey, segment: Segment) -> _Shelf:
        if key.audio_sha256 in self._pinned_audios:
            return self._pinned
        return self._shelf(segment)

    def _holder(self, key: EncodingKey) -> _Shelf | None:
        shelves = self._registered, self._inline, self._pinned
        return next((shelf for shelf in shelves if key in shelf.entries), None)

    def _move(self, key: EncodingKey) -> None:
        """Put what is here where it belongs now."""
        holder = self._holder(key)
        target = self._shelf_of(key, Segment.REGISTERED)
        if holder is not None and holder is not target:
            encoding = holder.remove(key)
            self._by_audio[key.audio_sha256].discard(key)
            self._add(target, key, encoding)
            if not self._by_audio[key.audio_sha256]:  # it does not fit there
                del self._by_audio[key.audio_sha256]

    def _add(self, shelf: _Shelf, key: EncodingKey, encoding: Encoding) -> None:
        if not shelf.fits(encoding):
            return
        self._by_audio[key.audio_sha256].add(key)
        for evicted in shelf.add(key, encoding):
            self._unlink(evicted)

    def _promote(self, key: EncodingKey) -> None:
        """Move an inline entry to the registered segment, if it fits there."""
        encoding = self._inline.entries[key]
        if self._registered.fits(encoding):
            self._inline.remove(key)
            self._add(self._registered, key, encoding)

    def _unlink(self, key: EncodingKey) -> None:
        siblings = self._by_audio[key.audio_sha256]
        siblings.discard(key)
        if not siblings:
            del self._by_audio[key.audio_sha256]
