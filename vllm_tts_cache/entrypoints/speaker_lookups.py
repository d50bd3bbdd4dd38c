"""Finding speakers: what requests and routes read of the catalogue."""

import asyncio
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from vllm_tts_cache.catalogue.ids import is_voice_id
from vllm_tts_cache.catalogue.names import fold, is_too_long
from vllm_tts_cache.catalogue.pages import Page
from vllm_tts_cache.catalogue.record import SpeakerRecord
from vllm_tts_cache.entrypoints import voice_models
from vllm_tts_cache.entrypoints.executors import BoundedExecutor, Lookups
from vllm_tts_cache.entrypoints.record_memory import RecordMemory
from vllm_tts_cache.entrypoints.tenant_keys import TenantKeys
from vllm_tts_cache.entrypoints.wants import GoneError, SpeakerReplacedError
from vllm_tts_cache.errors import SpeakerNotFoundError, StorageBusyError
from vllm_tts_cache.store.speaker_store import Found, SpeakerStore
from vllm_tts_cache.tenants import Tenant

MAX_WAITING_LISTS = 64
# How long a look-up waits for a process that opens or recovers the catalogue.
BUSY_SECONDS = 5.0
BUSY_POLL_SECONDS = 0.02


class SpeakerLookups:
    """The speakers of one server, read; for the event loop only.

    Args:
        store: Where they are.
        lookups: Runs indexed reads.
        keys: Whose API keys are whose.

    Attributes:
        reads: Runs what reads lists and files.
        known: Rows of speakers that requests named.
    """

    def __init__(self, store: SpeakerStore, lookups: Lookups, keys: TenantKeys):
        self._store = store
        self._lookups = lookups
        self._keys = keys
        self.reads = BoundedExecutor(
            "too many lists wait", num_threads=2, max_waiting=MAX_WAITING_LISTS
        )
        self.known = RecordMemory(store.now)

    async def find(self, tenant: Tenant, name: str) -> Found | None:
        """Return the tenant's speaker of this name, or None; one indexed read.

        Raises: StorageError.
        """
        until = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                return await self._lookups.run(self.find_now, name, tenant.name)
            except StorageBusyError:
                # A read waits for nobody but one who opens or recovers the file.
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(BUSY_POLL_SECONDS)

    async def find_to_speak(self, tenant: Tenant, name: str) -> Found | None:
        """As `find`; what it says of encodings may be of some time ago.

        Where the catalogue is on a server, nothing is asked there of a voice that this
        process knows; the voice itself is today's.

        Raises: StorageError.
        """
        if is_too_long(name):
            return None
        name = name.strip()
        # Remembered once, however it is spelt; what is like an id in capitals is none.
        if is_voice_id(key := fold(name)):
            key = name
        return await self.known.find(tenant.name, key, partial(self.find, tenant, name))

    def find_now(self, name: str, tenant: str) -> Found | None:
        """As `find`, on the calling thread. Raises: StorageError."""
        find = self._store.find_told if self._keys.is_on else self._store.find
        return find(name, tenant)

    async def get(self, tenant: Tenant, name: str) -> Found:
        """Return the tenant's speaker of this name.

        Raises: SpeakerNotFoundError, StorageError.
        """
        if (found := await self.find(tenant, name)) is None:
            raise SpeakerNotFoundError(name)
        return found

    async def check_stays(
        self, tenant: Tenant, name: str, audio_sha256: str | None
    ) -> None:
        """See that a speaker still has the audio that nobody could speak with.

        Raises: SpeakerNotFoundError, SpeakerReplacedError, StorageError.
        """
        found = await self.get(tenant, name)
        if found.record.audio_sha256 != audio_sha256:
            raise SpeakerReplacedError(found.record.name)

    async def get_all(
        self, tenant: Tenant, names: Iterable[str]
    ) -> list[SpeakerRecord]:
        """Return the tenant's speakers of all these names, read in a thread.

        Raises: SpeakerNotFoundError of the first that there is not, ServerBusyError,
            StorageError.
        """
        return await self.reads.run(self._all_now, tenant.name, names)

    def shown(self, record: SpeakerRecord, *, is_lost: bool = False) -> dict[str, Any]:
        """Show a voice as the routes do.

        Of several tenants none learns from a number how much the others register.
        """
        is_numbered = not self._keys.is_on
        return voice_models.voice(record, is_numbered=is_numbered, is_lost=is_lost)

    async def is_lost(self, record: SpeakerRecord) -> bool:
        """Whether its reference audio is not stored any more. Raises: StorageError."""
        return await self._lookups.run(self._store.is_lost, record)

    async def embedding(self, record: SpeakerRecord) -> tuple[float, ...]:
        """Return the embedding that a speaker was registered as.

        Raises: GoneError if it was deleted or replaced meanwhile.
        """
        look = self._store.catalogue.speaker_embedding

        async def read() -> tuple[float, ...] | None:
            return await self._lookups.run(look, record)

        if (found := await self.known.embedding(record, read)) is None:
            raise GoneError("The speaker embedding is not stored (any more).")
        return found

    async def audio(self, record: SpeakerRecord) -> tuple[bytes, str]:
        """Return the reference audio as a file, and its media type.

        Raises: SpeakerNotFoundError if there is none, ServerBusyError, StorageError.
        """
        file = None
        if (sha := record.audio_sha256) is not None:
            file = await self.reads.run(self._store.audio_for_client, sha)
        if file is None:
            raise SpeakerNotFoundError(record.name)
        return file

    async def records(self, page: Page) -> list[SpeakerRecord]:
        """Return a page of speakers, or its first ones; see `Catalogue.records`."""
        return await self.reads.run(self._store.catalogue.records, page)

    async def names(self, page: Page) -> list[str]:
        """Return the names of the same page, for less."""
        return await self.reads.run(self._store.catalogue.names, page)

    def _all_now(self, tenant: str, names: Iterable[str]) -> list[SpeakerRecord]:
        records: list[SpeakerRecord] = []
        for name in names:
            if (found := self.find_now(name, tenant)) is None:
                raise SpeakerNotFoundError(name)
            records.append(found.record)
        return records

    def shutdown(self) -> None:
        """Stop the threads."""
        self.reads.shutdown()
