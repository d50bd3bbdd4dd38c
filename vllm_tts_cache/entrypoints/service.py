"""Registering, finding and deleting speakers: what routes and adapters call."""

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm_tts_cache.audio.decode import AudioWarning
from vllm_tts_cache.audio.quality.check import ClipQuality
from vllm_tts_cache.catalogue.changes import SpeakerChanges
from vllm_tts_cache.catalogue.pages import Page
from vllm_tts_cache.catalogue.record import SpeakerRecord
from vllm_tts_cache.config import Settings, metrics_directory
from vllm_tts_cache.entrypoints import voice_models
from vllm_tts_cache.entrypoints.counts import Counts
from vllm_tts_cache.entrypoints.decoders import Decoders
from vllm_tts_cache.entrypoints.deletions import Deletions
from vllm_tts_cache.entrypoints.ensure import EncodingNeed, Ensurer
from vllm_tts_cache.entrypoints.executors import (
    BoundedExecutor,
    Lookups,
    Places,
    TenantPlaces,
)
from vllm_tts_cache.entrypoints.inline import InlineClips
from vllm_tts_cache.entrypoints.kv_warming import KVWarming, Prefill
from vllm_tts_cache.entrypoints.metrics.refresh import MetricsRefresh
from vllm_tts_cache.entrypoints.metrics.series import process_metrics
from vllm_tts_cache.entrypoints.previews import Previews
from vllm_tts_cache.entrypoints.prompt_memory import PromptMemory
from vllm_tts_cache.entrypoints.record_memory import RecordMemory
from vllm_tts_cache.entrypoints.served_model import CannotCloneError, ServedModel
from vllm_tts_cache.entrypoints.status import CacheStatus
from vllm_tts_cache.entrypoints.tenant_keys import TenantKeys
from vllm_tts_cache.entrypoints.told import ToldEnsurer
from vllm_tts_cache.entrypoints.uploads import Upload, Uploads
from vllm_tts_cache.entrypoints.wants import GoneError
from vllm_tts_cache.errors import (
    SpeakerNotFoundError,
    StorageBusyError,
    TTSCacheError,
)
from vllm_tts_cache.speaker.rpc_client import (
    STATS,
    AsyncEngine,
    AsyncWorkers,
    UnsupportedModelError,
)
from vllm_tts_cache.store.bundles import Bundles
from vllm_tts_cache.store.opening import open_store
from vllm_tts_cache.store.registrations import Registered
from vllm_tts_cache.store.speaker_store import Found, SpeakerStore
from vllm_tts_cache.tenants import DEFAULT_TENANT, Caller, Tenant
from vllm_tts_cache.throttled_log import ThrottledLog

logger = logging.getLogger("vllm.vllm_tts_cache")
throttled = ThrottledLog(logger)

# Of what prompts begin with, per process: about 5,000 voices of 30 s on Fish Speech.
PROMPT_MEMORY_MAX_BYTES = 16 * 1024 * 1024
MAX_WAITING_LISTS = 64
MAX_BUNDLES = 4
MAX_ARCHIVES = 2
# How long a look-up waits for a process that opens or recovers the catalogue.
BUSY_SECONDS = 5.0
BUSY_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What registering answers."""

    record: SpeakerRecord
    warnings: tuple[AudioWarning, ...] = ()
    quality: ClipQuality | None = None


class SpeakerService:
    """The speakers of one server; safe beside other servers on the same storage.

    For the event loop only.

    Args:
        engine: The host's engine client; None if the model has none (diffusion).
        model: What is served.
        keys: Whose API keys are whose.

    Attributes:
        model: What is served.
        kv_warming: Prefills voices that were precomputed.
        tenants: Whose API keys are whose.
        uploads: Decodes and stores what comes.
        bundles: Exports and imports voices.
        bundling: Runs that, one at a time: a bundle may have 64 MiB.
        exports: Bundles that are being sent.
        archives: The same of archives, which take minutes.
        places: Inline references of each tenant that are worked on.
        known_records: Rows of speakers that requests named.
        previews: What voices have said to try them.
        reads: Runs what reads lists and files.
        may_download: Whether the operator lets reference audio out.
    """

    def __init__(
        self,
        store: SpeakerStore,
        settings: Settings,
        engine: AsyncEngine | None,
        model: ServedModel,
        keys: TenantKeys,
        prefill: Prefill | None = None,
    ):
        self.store = store
        self.model = model
        self.tenants = keys
        self._workers = None if engine is None else AsyncWorkers(engine)
        self._lookups = Lookups(is_local=store.catalogue.is_local)
        self.uploads = Uploads(store, model.family, settings.min_quality)
        self.reads = BoundedExecutor(
            "too many lists wait", num_threads=2, max_waiting=MAX_WAITING_LISTS
        )
        self.bundles = Bundles(store, settings.bundle_key, self._find)
        self.places = TenantPlaces()
        self._told = ToldEnsurer(store, self._lookups)
        self.bundling = BoundedExecutor(
            "too many bundles wait", num_threads=1, max_waiting=MAX_BUNDLES
        )
        self.exports = Places("too many bundles are being sent", MAX_BUNDLES)
        self.archives = Places("too many archives are being sent", MAX_ARCHIVES)
        self.previews = Previews(store, self.reads)
        self.may_download = settings.audio_download
        self._background: set[asyncio.Task[None]] = set()
        self._is_introducing = False
        self.prompts = PromptMemory[Any](PROMPT_MEMORY_MAX_BYTES)
        self.known_records = RecordMemory(store.now)
        self._counts = Counts(store, settings, keys, self.known_records)
        self.kv_warming = KVWarming(prefill, is_on=settings.warm_kv == "idle")
        self.inline = InlineClips(
            store, self._lookups, max_fetches=settings.max_fetches
        )
        self._decoders = Decoders(self._workers, self.model.family)
        self.deletions = Deletions(
            store,
            self._lookups,
            self._cloning_workers,
            self._decoders,
            self.known_records,
            self._forget,
            self._forget_all,
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
        self.metrics = MetricsRefresh(
            process_metrics(),
            store,
            self._cloning_workers,
            self._decoders,
            lambda: 0 if self._ensurer is None else self._ensurer.num_flights,
            metrics_directory(),
        )

    @property
    def ensurer(self) -> Ensurer:
        """What makes encodings exist.

        Raises: CannotCloneError.
        """
        if self._ensurer is None or self.model.family() is None:
            raise self.model.cannot_clone()
        return self._ensurer

    def start(self) -> None:
        """Begin what goes on in the background; needs a running event loop."""
        self.tenants.start()
        self.deletions.start()
        self.metrics.start()
        self._introduce()
        if self.tenants.is_on:
            self._in_background(self._take_in())

    @property
    def knows_encoders(self) -> bool:
        """Whether voices can be cloned here, if the model clones any.

        If not, the workers are asked once more.
        """
        if self._cloning_workers() is None or self.ensurer.is_introduced:
            return True
        self._introduce()
        return False

    def shutdown(self) -> None:
        """Let go of threads, tasks and files."""
        for task in self._background:
            task.cancel()
        self.kv_warming.shutdown()
        self.tenants.shutdown()
        if self._ensurer is not None:
            self._ensurer.shutdown()
        self.deletions.shutdown()
        self.metrics.shutdown()
        pools = (
            *(self.inline, self.uploads, self.reads, self.bundling, self._lookups),
            self._told,
        )
        for threads in pools:
            threads.shutdown()
        self.store.close()

    # -------- registering

    async def register_audio(
        self,
        tenant: Tenant,
        upload: Upload,
        *files: bytes,
        precompute: bool,
        check: bool = True,
    ) -> Registration:
        """Register a speaker by a reference clip, or by several.

        Raises: SpeakerRequestError, ServerBusyError, StorageError.
        """
        clip = await self.uploads.register_audio(tenant, upload, *files, check=check)
        record = clip.done.record
        await self.registered(clip.done, precompute=precompute)
        return Registration(record=record, warnings=clip.warnings, quality=clip.quality)

    async def registered(self, done: Registered, *, precompute: bool) -> None:
        """Go on with a voice that is in the store: what it replaced, its encodings.

        Raises: StorageError.
        """
        if done.deletion is not None:
            self.deletions.carry_out(done.deletion)
        if precompute:
            self._precompute_in_background(done.record)
        await self.deletions.told(done.change)

    async def register_embedding(
        self, tenant: Tenant, upload: Upload, embedding: tuple[float, ...]
    ) -> Registration:
        """Register a speaker by a raw speaker embedding: ready at once.

        Raises: SpeakerRequestError, ServerBusyError, StorageError.
        """
        done = await self.uploads.register_embedding(tenant, upload, embedding)
        await self.registered(done, precompute=False)
        return Registration(record=done.record)

    async def change(
        self, tenant: Tenant, name: str, changes: SpeakerChanges
    ) -> SpeakerRecord:
        """Change what is written beside a speaker.

        Raises: SpeakerNotFoundError, SpeakerExistsError, InvalidSpeakerError,
            ServerBusyError, StorageError.
        """
        done = await self.uploads.threads.run(
            self.store.change, name, changes, tenant.name, tenant.limits
        )
        is_new = bool(done.record.ref_text) and done.deletion is not None
        await self.registered(done, precompute=is_new)
        return done.record

    # -------- looking

    async def find(self, tenant: Tenant, name: str) -> Found | None:
        """Return the tenant's speaker of this name, or None; one indexed read.

        Raises: StorageError.
        """
        until = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                return await self._lookups.run(self._find, name, tenant.name)
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
        read = partial(self.find, tenant, name)
        return await self.known_records.find(tenant.name, name, read)

    async def get(self, tenant: Tenant, name: str) -> Found:
        """Return the tenant's speaker of this name.

        Raises: SpeakerNotFoundError, StorageError.
        """
        if (found := await self.find(tenant, name)) is None:
            raise SpeakerNotFoundError(name)
        return found

    def shown(self, record: SpeakerRecord) -> dict[str, Any]:
        """Show a voice as the routes do.

        Of several tenants none learns from a number how much the others register.
        """
        return voice_models.voice(record, is_numbered=not self.tenants.is_on)

    async def speaker_embedding(self, record: SpeakerRecord) -> tuple[float, ...]:
        """Return the embedding that a speaker was registered as.

        Raises: SpeakerNotFoundError if it was deleted or replaced meanwhile.
        """
        look = self.store.catalogue.speaker_embedding

        async def read() -> tuple[float, ...] | None:
            return await self._lookups.run(look, record)

        if (found := await self.known_records.embedding(record, read)) is None:
            raise SpeakerNotFoundError(record.name)
        return found

    async def audio(self, record: SpeakerRecord) -> tuple[bytes, str]:
        """Return the reference audio as a file, and its media type.

        Raises: SpeakerNotFoundError if there is none, ServerBusyError, StorageError.
        """
        file = None
        if (sha := record.audio_sha256) is not None:
            file = await self.reads.run(self.store.audio_for_client, sha)
        if file is None:
            raise SpeakerNotFoundError(record.name)
        return file

    async def records(self, page: Page) -> list[SpeakerRecord]:
        """Return a page of speakers, ordered by name."""
        return await self.reads.run(self.store.catalogue.records, page)

    async def names(self, page: Page) -> list[str]:
        """Return the names of the same page, for less."""
        return await self.reads.run(self.store.catalogue.names, page)

    async def stats(self, caller: Caller) -> dict[str, object]:
        """Count what the caller may know of.

        Without tenants, and for an administrator, that is what is registered and
        stored, and each worker's counters; for one tenant of several what it has.

        Raises: WorkerRPCError, StorageError.
        """
        if self.tenants.is_on and caller.tenant is not None:
            return await self.reads.run(self._counts.of_tenant, caller.tenant)
        known = await self.reads.run(self._counts.of_all)
        flights = 0 if self._ensurer is None else self._ensurer.num_flights
        workers = []
        if (cloning := self._cloning_workers()) is not None:
            answers = await cloning.call(STATS)
            workers = [{"rank": answer.rank, **answer.stats} for answer in answers]
        shown = {**known, "flights": flights, "workers": workers}
        if decoders := await self._decoders.stats():
            shown["decoders"] = [answer.shown for answer in decoders]
        if (warming := self.kv_warming.stats()) is not None:
            shown["kv_warming"] = warming
        return shown

    # -------- encodings

    async def precompute(self, found: Found, *, force: bool) -> bool:
        """Make the speaker's encodings exist; True if they already did.

        Raises: SpeakerNotFoundError if it is deleted meanwhile, CannotCloneError,
            and as `Ensurer.ensure`.
        """
        try:
            existed = await self._precompute(found, force=force)
        except GoneError:
            tenant = Tenant(name=found.record.tenant)
            found = await self.get(tenant, found.record.name)
            existed = await self._precompute(found, force=force)
        self.kv_warming.add(found.record)
        return existed

    async def ensure(
        self,
        tenant: str,
        need: EncodingNeed,
        *,
        stored: frozenset[str] | None = None,
        urgent: bool = True,
        force: bool = False,
    ) -> bool:
        """Return when the encodings exist; True if the tenant may know they did.

        Args:
            tenant: Who asks.
            need: Which encodings.
            stored: What `find` said of them; None if nobody has looked.
            urgent: Whether a request waits.
            force: Encode anew what exists.

        Raises: CannotCloneError, and as `Ensurer.ensure`.
        """
        how = {"urgent": urgent, "force": force}
        if stored is not None and not await self._covers(stored, need):
            stored = None
        if not self.tenants.is_on:
            return await self.ensurer.ensure(need, stored=stored, **how)
        return await self._told.ensure(self.ensurer, tenant, need, told=stored, **how)

    async def status(self, found: Found) -> tuple[CacheStatus, str | None]:
        """Derive the speaker's status and, of what cannot be ``ready``, the reason.

        Raises: WorkerRPCError, StorageError.
        """
        try:
            self.model.check_clones()
            if found.record.audio_sha256 is None:
                return "ready", None
            need, stored = self.model.need_of(found.record), found.fingerprints
            if not self.tenants.is_on:
                return await self.ensurer.status(need, stored)
            tenant = found.record.tenant
            return await self._told.status(self.ensurer, tenant, need, stored)
        except CannotCloneError as exc:
            return "unsupported", str(exc)
        except UnsupportedModelError:
            return "unsupported", self.model.reason

    # -------- how

    async def _precompute(self, found: Found, *, force: bool) -> bool:
        self.model.check_clones()
        if found.record.audio_sha256 is None:
            return True
        record, stored = found.record, found.fingerprints
        need = self.model.need_of(record)
        return await self.ensure(record.tenant, need, stored=stored, force=force)

    async def _covers(self, stored: frozenset[str], need: EncodingNeed) -> bool:
        """Whether what `find` said is to be believed: it may be of some time ago."""
        if self.store.catalogue.is_local:  # where nothing is remembered
            return True
        keys = await self.ensurer.keys(need)
        return all(key.encoder_fingerprint in stored for key in keys)

    def _introduce(self) -> None:
        async def introduce() -> None:
            # By now the serving class, which starts this, knows its family.
            try:
                if self._cloning_workers() is not None:
                    await self.ensurer.introduce()
            finally:
                self._is_introducing = False

        if not self._is_introducing:
            self._is_introducing = True
            self._in_background(introduce())

    async def _take_in(self) -> None:
        # Whoever was alone before there were tenants knows of its own encodings.
        await self.reads.run(self.store.take_tenant_in, DEFAULT_TENANT)

    def _find(self, name: str, tenant: str) -> Found | None:
        find = self.store.find_told if self.tenants.is_on else self.store.find
        return find(name, tenant)

    def _cloning_workers(self) -> AsyncWorkers | None:
        return None if self.model.family() is None else self._workers

    def _precompute_in_background(self, record: SpeakerRecord) -> None:
        if self._cloning_workers() is None:
            return
        with suppress(CannotCloneError):  # registered where another model was served
            need = self.model.need_of(record)
            self._in_background(self._ensured_and_warm(record, need))

    async def _ensured_and_warm(
        self, record: SpeakerRecord, need: EncodingNeed
    ) -> None:
        await self.ensure(record.tenant, need, urgent=False)
        self.kv_warming.add(record)

    def _in_background(self, work: Coroutine[Any, Any, object]) -> None:
        async def run() -> None:
            try:
                await work
            except TTSCacheError as exc:  # the next request that needs it says it
                throttled.warn_of("precomputing", "In the background: %s", exc.log_text)

        task = asyncio.create_task(run())
        self._background.add(task)  # the loop itself keeps only a weak reference
        task.add_done_callback(self._background.discard)
        # One that is cancelled before it began would leave it unawaited.
        task.add_done_callback(lambda _task: work.close())

    def _forget(self, audio_sha256: str) -> None:
        self.prompts.forget(audio_sha256)
        self.inline.forget(audio_sha256)
        self.kv_warming.forget(audio_sha256)
        if self._ensurer is not None:
            self._ensurer.forget(audio_sha256)

    def _forget_all(self) -> None:
        self.known_records.forget_all()
        self.prompts.forget_all()
        self.inline.forget_all()
        self.kv_warming.forget_all()
        if self._ensurer is not None:
            self._ensurer.forget_all()


def open_service(
    settings: Settings,
    engine: AsyncEngine | None,
    model: ServedModel,
    *,
    prefill: Prefill | None = None,
) -> SpeakerService:
    """Open the storage and put the service on top of it.

    Args:
        settings: Where, and how much.
        engine: None where there are no workers.
        model: What is served.
        prefill: Prefills voices; None where none can be.

    Raises: StorageError, ConfigError.
    """
    keys = TenantKeys(settings.tenants_file)
    store = open_store(settings)
    return SpeakerService(store, settings, engine, model, keys, prefill)
