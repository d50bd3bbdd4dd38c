"""Finds speakers, and reads of the catalogue what requests and routes need."""

import asyncio
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from cachetools import LRUCache

from vllm_tts_cache.catalogue.records import SpeakerRecord
from vllm_tts_cache.entrypoints.speakers.executors import BoundedExecutor
from vllm_tts_cache.errors import (
    GoneError,
    SpeakerNotFoundError,
    SpeakerReplacedError,
    StorageBusyError,
    StorageUnavailableError,
)
from vllm_tts_cache.store.speaker_store import SpeakerStore, StoredSpeaker
from vllm_tts_cache.tenants import Tenant

P = ParamSpec("P")
T = TypeVar("T")

MAX_WAITING_LISTS = 64
# How long a look-up waits for a process that opens or recovers the catalogue.
BUSY_SECONDS = 5.0
BUSY_POLL_SECONDS = 0.02
# A row takes 1 to 2 KB, with a long transcript some more.
MAX_LAST_ROWS = 8192
# An embedding of 2048 numbers takes 64 KB.
MAX_LAST_EMBEDDINGS = 256
# Clocks of machines do not run equally fast.
MARGIN_SECONDS = 1.0


def boot_seconds() -> float:
    """Return seconds of a clock that also counts suspended time, if there is one."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


class ReadExecutor:
    """Indexed reads: on the event loop where the catalogue is local, else in threads.

    On a local disk one takes less than handing it to a thread and back does; a
    database or a disk behind a network may take long enough to hold up all requests.

    Attributes:
        is_local: Whether it calls what it runs at once, as its caller may as well.
    """

    def __init__(self, *, is_local: bool):
        self.is_local = is_local
        self._executor = BoundedExecutor(
            "too many look-ups wait for the catalogue", num_threads=4, max_waiting=1024
        )

    async def run(self, look: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what ``look`` returns; it must be small and safe in any thread.

        Raises: ServerBusyError, and whatever ``look`` raises.
        """
        if self.is_local:
            return look(*args, **kwargs)
        return await self._executor.run(look, *args, **kwargs)

    def shutdown(self) -> None:
        """Stop the threads."""
        self._executor.shutdown()


class LastRows:
    """Rows that requests last read, for use while the catalogue is out of reach.

    A request reads the catalogue. If that is out of reach, it gets the last row that
    this process read, but only while deletions wait for this process to confirm them,
    so that none was answered meanwhile. For the event loop only.

    Attributes:
        num_deletes: How often something was deleted; a row that was read before the
            last time must not be kept.
        embeddings: The last ones, by id and generation of their rows: a failover that
            lost a registration gives its generation to another speaker.
    """

    def __init__(self) -> None:
        self._rows = LRUCache[tuple[str, str], StoredSpeaker](MAX_LAST_ROWS)
        self.embeddings = LRUCache[tuple[str, int], tuple[float, ...]](
            MAX_LAST_EMBEDDINGS
        )
        self._good_until = self._epoch = 0.0
        self.num_deletes = 0

    def good_for(self, seconds: float, asked_at: float, epoch: float = 0.0) -> None:
        """Set for how long deletions wait for this process, as the catalogue says.

        Args:
            seconds: Counted from ``asked_at``; negative if they do not wait.
            asked_at: When the catalogue was asked, by `boot_seconds`.
            epoch: The catalogue's. Rows of another one may be of registrations that a
                failover lost, and are deleted.
        """
        if epoch != self._epoch:
            self._epoch = epoch
            self.delete_all()
        self._good_until = asked_at + seconds - MARGIN_SECONDS

    def find(self, tenant: str, name: str, now: float) -> StoredSpeaker | None:
        """Return the last row of a name or id; None if there is none that is valid.

        Args:
            tenant: The speaker's.
            name: As the request spells it, whatever white space is around it.
            now: Unix seconds of the catalogue.
        """
        found = self._rows.get((tenant, name.strip()))
        if found is None or boot_seconds() >= self._good_until:
            return None
        return None if found.record.has_expired(now) else found

    def keep(self, tenant: str, name: str, found: StoredSpeaker | None) -> None:
        """Keep the row that was read of a name or id; if None, delete the last one."""
        key = tenant, name.strip()  # else of any length
        if found is None:
            self._rows.pop(key, None)
        else:
            self._rows[key] = found

    def delete(self, speaker_id: str | None, audio_sha256: str | None = None) -> None:
        """Delete what was read of a speaker and of an audio; all, if both are None."""
        gone = {speaker_id, audio_sha256} - {None}
        self.num_deletes += 1
        for key, found in list(self._rows.items()):
            of_it = {found.record.speaker_id, found.record.audio_sha256}
            if not gone or gone & of_it:
                del self._rows[key]
        for id_, generation in list(self.embeddings):
            if not gone or id_ == speaker_id:
                del self.embeddings[id_, generation]

    def delete_all(self) -> None:
        """Delete all rows."""
        self.num_deletes += 1
        self._rows.clear()
        self.embeddings.clear()


class SpeakerLookups:
    """Reads the speakers of one server; for the event loop only.

    Args:
        store: Has the speakers.
        lookups: Runs indexed reads.

    Attributes:
        reads: Runs reads of lists and files.
        last: Rows for requests while the catalogue is out of reach.
    """

    def __init__(self, store: SpeakerStore, lookups: ReadExecutor):
        self._store = store
        self._lookups = lookups
        self.reads = BoundedExecutor(
            "too many lists wait", num_threads=2, max_waiting=MAX_WAITING_LISTS
        )
        self.last = LastRows()

    async def find(self, tenant: Tenant, name: str) -> StoredSpeaker | None:
        """Return the tenant's speaker of this name, or None; one indexed read.

        Raises: StorageError.
        """
        until = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                return await self._lookups.run(self._store.find, name, tenant.name)
            except StorageBusyError:
                # Only a process that opens or recovers the file keeps a read waiting.
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(BUSY_POLL_SECONDS)

    async def find_to_speak(self, tenant: Tenant, name: str) -> StoredSpeaker | None:
        """Return what `find` does, or by `LastRows` if the catalogue is out of reach.

        Raises: StorageError.
        """
        num_deletes = self.last.num_deletes
        try:
            found = await self.find(tenant, name)
        except StorageUnavailableError:
            known = self.last.find(tenant.name, name, self._store.database.now())
            if known is None:
                raise
            return known
        # A local file is never out of reach.
        if not self._store.is_local and num_deletes == self.last.num_deletes:
            self.last.keep(tenant.name, name, found)
        return found

    async def get(self, tenant: Tenant, name: str) -> StoredSpeaker:
        """Return the tenant's speaker of this name.

        Raises: SpeakerNotFoundError, StorageError.
        """
        if (found := await self.find(tenant, name)) is None:
            raise SpeakerNotFoundError(name)
        return found

    async def check_stays(
        self,
        tenant: Tenant,
        name: str,
        audio_sha256: str | None,
        generation: int | None = None,
    ) -> None:
        """Check that a speaker still has the audio that a request failed with.

        The same clip may be registered again after another one: with the generation,
        where the caller knows it, that counts as replaced, too.

        Raises: SpeakerNotFoundError, SpeakerReplacedError, StorageError.
        """
        now = (await self.get(tenant, name)).record
        is_same = now.audio_sha256 == audio_sha256
        if not is_same or generation not in (None, now.generation):
            raise SpeakerReplacedError(now.name)

    async def embedding(self, record: SpeakerRecord) -> tuple[float, ...]:
        """Return the embedding that a speaker was registered as.

        Raises: GoneError if the speaker was deleted or replaced meanwhile.
        """
        look = self._store.speaker_embedding
        row = record.speaker_id, record.generation
        try:
            found = await self._lookups.run(look, record)
        except StorageUnavailableError:
            found = self.last.embeddings.get(row)
            if found is None:
                raise
        if found is None:
            raise GoneError("The speaker embedding is not stored (any more).")
        if not self._store.is_local:
            self.last.embeddings[row] = found
        return found

    async def audio(self, record: SpeakerRecord) -> tuple[bytes, str]:
        """Return the reference audio as a file, and its media type.

        Raises: SpeakerNotFoundError without audio, ServerBusyError, StorageError.
        """
        file = None
        if (sha := record.audio_sha256) is not None:
            file = await self.reads.run(self._store.audio_for_client, sha)
        if file is None:
            raise SpeakerNotFoundError(record.name)
        return file

    def shutdown(self) -> None:
        """Stop the threads."""
        self.reads.shutdown()
