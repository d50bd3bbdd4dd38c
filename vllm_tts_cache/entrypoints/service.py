"""Registering, finding and deleting speakers: what routes and adapters call."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from vllm_tts_cache.audio.decode import AudioWarning
from vllm_tts_cache.catalogue.record import Segment, SpeakerRecord
from vllm_tts_cache.catalogue.speakers import Page
from vllm_tts_cache.catalogue.stored_files import Usage
from vllm_tts_cache.config import Settings
from vllm_tts_cache.entrypoints.deletions import Deletions
from vllm_tts_cache.entrypoints.ensure import EncodingNeed, Ensurer
from vllm_tts_cache.entrypoints.executors import BoundedExecutor, Lookups
from vllm_tts_cache.entrypoints.inline import InlineClips
from vllm_tts_cache.entrypoints.prompt_memory import PromptMemory
from vllm_tts_cache.entrypoints.status import CacheStatus
from vllm_tts_cache.entrypoints.uploads import Upload, Uploads
from vllm_tts_cache.entrypoints.wants import GoneError
from vllm_tts_cache.errors import (
    SpeakerNotFoundError,
    SpeakerRequestError,
    StorageBusyError,
    TTSCacheError,
)
from vllm_tts_cache.speaker.family import Family
from vllm_tts_cache.speaker.ref import SpeakerRef
from vllm_tts_cache.speaker.rpc_client import (
    STATS,
    AsyncEngine,
    AsyncWorkers,
    UnsupportedModelError,
)
from vllm_tts_cache.store.opening import open_store
from vllm_tts_cache.store.registrations import Registered
from vllm_tts_cache.store.speaker_store import Found, SpeakerStore
from vllm_tts_cache.throttled_log import ThrottledLog

logger = logging.getLogger("vllm.vllm_tts_cache")
throttled = ThrottledLog(logger)

# Of what prompts begin with, per process: about 5,000 voices of 30 s on Fish Speech.
PROMPT_MEMORY_MAX_BYTES = 16 * 1024 * 1024
MAX_WAITING_LISTS = 64
# How long a look-up waits for a process that opens or recovers the catalogue.
BUSY_SECONDS = 5.0
BUSY_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What registering answers."""

    record: SpeakerRecord
    warnings: tuple[AudioWarning, ...] = ()


class CannotCloneError(SpeakerRequestError):
    """The model that is served clones no voices, or not through us."""


class SpeakerService:
    """The speakers of one server; safe beside other servers on the same storage.

    For the event loop only.

    Args:
        engine: The host's engine client; None if the model has none (diffusion).
        family: Tells which family is served; None if it clones not through us.
        refusal: Tells why the model clones no voices, if a family of ours knows.
        note: Tells what becomes of references on a model that is of no family of ours.
    """

    def __init__(
        self,
        store: SpeakerStore,
        settings: Settings,
        engine: AsyncEngine | None,
        family: Callable[[], Family | None],
        refusal: Callable[[], str | None],
        note: Callable[[], str],
    ):
        self.store = store
        self._family = family
        self._refusal = refusal
        self._note = note
        self._workers = None if engine is None else AsyncWorkers(engine)
        self._lookups = Lookups(is_local=store.catalogue.is_local)
        self._uploads = Uploads(store, family)
        self._reads = BoundedExecutor(
            "too many lists wait", num_threads=2, max_waiting=MAX_WAITING_LISTS
        )
        self._max_bytes = {
            "registered_audio": settings.audio_max_bytes,
            "inline_audio": settings.inline_audio_max_bytes,
            "encodings": settings.disk_max_bytes,
        }
        self._background: set[asyncio.Task[None]] = set()
        self.prompts = PromptMemory[Any](PROMPT_MEMORY_MAX_BYTES)
        self.inline = InlineClips(
            store, self._lookups, max_fetches=settings.max_fetches
        )
        self.deletions = Deletions(
            store, self._lookups, self._cloning_workers, self._forget
        )
        self._ensurer = None
        if self._workers is not None:
            self._ensurer = Ensurer(
                self._workers,
                store,
                self._lookups,
                timeout_seconds=settings.encode_timeout_seconds,
                max_waiting_inline=settings.max_waiting_inline,
            )

    @property
    def ensurer(self) -> Ensurer:
        """What makes encodings exist.

        Raises: CannotCloneError.
        """
        if self._ensurer is None or self._family() is None:
            raise self._cannot_clone()
        return self._ensurer

    def start(self) -> None:
        """Begin what goes on in the background; needs a running event loop."""
        self.deletions.start()
        self._in_background(self._introduce())

    def shutdown(self) -> None:
        """Let go of threads, tasks and files."""
        for task in self._background:
            task.cancel()
        if self._ensurer is not None:
            self._ensurer.shutdown()
        self.deletions.shutdown()
        for threads in (self.inline, self._uploads, self._reads, self._lookups):
            threads.shutdown()
        self.store.close()

    # -------- registering

    async def register_audio(
        self, upload: Upload, data: bytes, *, precompute: bool
    ) -> Registration:
        """Register a speaker by a reference clip.

        Raises: SpeakerRequestError, ServerBusyError, StorageError.
        """
        done, warnings = await self._uploads.register_audio(upload, data)
        self._replaced(done)
        if precompute:
            self._precompute_in_background(done.record)
        return Registration(record=done.record, warnings=warnings)

    async def register_embedding(
        self, upload: Upload, embedding: tuple[float, ...]
    ) -> Registration:
        """Register a speaker by a raw speaker embedding: ready at once.

        Raises: SpeakerRequestError, ServerBusyError, StorageError.
        """
        done = await self._uploads.register_embedding(upload, embedding)
        self._replaced(done)
        return Registration(record=done.record)

    # -------- looking

    async def find(self, name: str) -> Found | None:
        """Return the speaker of this name, or None; one indexed read.

        Raises: StorageError.
        """
        until = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                return await self._lookups.run(self.store.find, name)
            except StorageBusyError:
                # A read waits for nobody but one who opens or recovers the file.
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(BUSY_POLL_SECONDS)

    async def get(self, name: str) -> Found:
        """Return the speaker of this name.

        Raises: SpeakerNotFoundError, StorageError.
        """
        if (found := await self.find(name)) is None:
            raise SpeakerNotFoundError(name)
        return found

    async def speaker_embedding(self, record: SpeakerRecord) -> tuple[float, ...]:
        """Return the embedding that a speaker was registered as.

        Raises: SpeakerNotFoundError if it was deleted or replaced meanwhile.
        """
        look = self.store.catalogue.speaker_embedding
        if (found := await self._lookups.run(look, record)) is None:
            raise SpeakerNotFoundError(record.name)
        return found

    async def records(self, page: Page) -> list[SpeakerRecord]:
        """Return a page of speakers, ordered by name."""
        return await self._reads.run(self.store.catalogue.records, page)

    async def names(self, page: Page) -> list[str]:
        """Return the names of the same page, for less."""
        return await self._reads.run(self.store.catalogue.names, page)

    async def stats(self) -> dict[str, object]:
        """Count what is registered and stored, and show each worker's counters.

        Raises: WorkerRPCError, StorageError.
        """
        known = await self._reads.run(self._counts)
        flights = 0 if self._ensurer is None else self._ensurer.num_flights
        workers = []
        if (cloning := self._cloning_workers()) is not None:
            answers = await cloning.call(STATS)
            workers = [{"rank": answer.rank, **answer.stats} for answer in answers]
        return {**known, "flights": flights, "workers": workers}

    # -------- encodings

    async def precompute(self, found: Found, *, force: bool) -> bool:
        """Make the speaker's encodings exist; True if they already did.

        Raises: SpeakerNotFoundError if it is deleted meanwhile, CannotCloneError,
            and as `Ensurer.ensure`.
        """
        try:
            return await self._precompute(found, force=force)
        except GoneError:
            found = await self.get(found.record.name)
            return await self._precompute(found, force=force)

    async def status(self, found: Found) -> tuple[CacheStatus, str | None]:
        """Derive the speaker's status and, of what cannot be ``ready``, the reason.

        Raises: WorkerRPCError, StorageError.
        """
        try:
            self._check_clones()
            if found.record.audio_sha256 is None:
                return "ready", None
            need = self._need_of(found.record)
            return await self.ensurer.status(need, found.fingerprints)
        except (CannotCloneError, UnsupportedModelError):
            return "unsupported", self._reason()

    # -------- how

    def _check_clones(self) -> None:
        """Refuse what the checkpoint cannot do. Raises: CannotCloneError."""
        if self._refusal() is not None:
            raise self._cannot_clone()

    def _cannot_clone(self) -> CannotCloneError:
        return CannotCloneError(self._reason())

    def _reason(self) -> str:
        return self._refusal() or self._note()

    async def _precompute(self, found: Found, *, force: bool) -> bool:
        self._check_clones()
        if found.record.audio_sha256 is None:
            return True
        need = self._need_of(found.record)
        return await self.ensurer.ensure(need, stored=found.fingerprints, force=force)

    async def _introduce(self) -> None:
        # By now the serving class, which starts this, knows its family.
        if self._ensurer is not None and self._family() is not None:
            await self._ensurer.introduce()

    def _cloning_workers(self) -> AsyncWorkers | None:
        return None if self._family() is None else self._workers

    def _need_of(self, record: SpeakerRecord) -> EncodingNeed:
        """Return what a speaker with audio needs in its own mode.

        Raises: CannotCloneError.
        """
        assert record.audio_sha256 is not None
        if (family := self._family()) is None:
            raise self._cannot_clone()
        ref = SpeakerRef(audio_sha256=record.audio_sha256, segment=Segment.REGISTERED)
        names = family.precomputed(has_transcript=bool(record.ref_text))
        return EncodingNeed(ref=ref, encoder_names=names)

    def _replaced(self, done: Registered) -> None:
        if done.deletion is not None:
            self.deletions.carry_out(done.deletion)

    def _precompute_in_background(self, record: SpeakerRecord) -> None:
        if self._cloning_workers() is not None:
            need = self._need_of(record)
            self._in_background(self.ensurer.ensure(need, urgent=False))

    def _in_background(self, work: Coroutine[Any, Any, object]) -> None:
        async def run() -> None:
            try:
                await work
            except TTSCacheError as exc:  # the next request that needs it says it
                throttled.warn_of("precomputing", "In the background: %s", exc)

        task = asyncio.create_task(run())
        self._background.add(task)  # the loop itself keeps only a weak reference
        task.add_done_callback(self._background.discard)
        # One that is cancelled before it began would leave it unawaited.
        task.add_done_callback(lambda _task: work.close())

    def _forget(self, audio_sha256: str) -> None:
        self.prompts.forget(audio_sha256)
        self.inline.forget(audio_sha256)
        if self._ensurer is not None:
            self._ensurer.forget(audio_sha256)

    def _counts(self) -> dict[str, object]:
        catalogue = self.store.catalogue
        storage: dict[str, object] = {
            segment.value: {kind: _shown(used) for kind, used in kinds.items()}
            for segment, kinds in catalogue.usage().items()
        }
        storage["max_bytes"] = self._max_bytes
        return {
            "registry": {"speakers": catalogue.count()},
            "storage": storage,
            "deletions": {"unfinished": catalogue.num_unfinished_deletions()},
        }


def _shown(used: Usage) -> dict[str, int]:
    return {"files": used.num_files, "bytes": used.num_bytes}


def open_service(
    settings: Settings,
    engine: AsyncEngine | None,
    family: Callable[[], Family | None],
    refusal: Callable[[], str | None],
    note: Callable[[], str],
) -> SpeakerService:
    """Open the storage and put the service on top of it.

    Raises: StorageError.
    """
    return SpeakerService(open_store(settings), settings, engine, family, refusal, note)
