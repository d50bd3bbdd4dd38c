"""Registering, finding and deleting speakers: what routes and adapters call."""

from dataclasses import dataclass
from typing import Any, Protocol

from vllm_tts_cache.audio.decode import AudioWarning
from vllm_tts_cache.audio.quality.check import ClipQuality
from vllm_tts_cache.catalogue.changes import SpeakerChanges
from vllm_tts_cache.catalogue.record import SpeakerRecord
from vllm_tts_cache.config import Settings, metrics_directory
from vllm_tts_cache.entrypoints.counts import Counts
from vllm_tts_cache.entrypoints.decoders import Decoders
from vllm_tts_cache.entrypoints.deletions import Deletions
from vllm_tts_cache.entrypoints.executors import (
    BoundedExecutor,
    Lookups,
    Places,
    TenantPlaces,
)
from vllm_tts_cache.entrypoints.fetching import FetchConnection
from vllm_tts_cache.entrypoints.inline import InlineClips
from vllm_tts_cache.entrypoints.kv_warming import KVWarming, Prefill
from vllm_tts_cache.entrypoints.metrics.refresh import MetricsRefresh
from vllm_tts_cache.entrypoints.metrics.series import process_metrics
from vllm_tts_cache.entrypoints.previews import Previews
from vllm_tts_cache.entrypoints.prompt_memory import PromptMemory
from vllm_tts_cache.entrypoints.served_model import ServedModel
from vllm_tts_cache.entrypoints.speaker_encodings import SpeakerEncodings
from vllm_tts_cache.entrypoints.speaker_lookups import SpeakerLookups
from vllm_tts_cache.entrypoints.tenant_keys import TenantKeys
from vllm_tts_cache.entrypoints.uploads import Upload, Uploads
from vllm_tts_cache.speaker.rpc_client import STATS, AsyncEngine, AsyncWorkers
from vllm_tts_cache.store.bundles import Bundles
from vllm_tts_cache.store.opening import open_store
from vllm_tts_cache.store.registrations import Registered
from vllm_tts_cache.store.speaker_store import SpeakerStore
from vllm_tts_cache.tenants import Caller, Tenant

# Of what prompts begin with, per process: about 5,000 voices of 30 s on Fish Speech.
PROMPT_MEMORY_MAX_BYTES = 16 * 1024 * 1024
MAX_BUNDLES = 4
MAX_ARCHIVES = 2
MAX_SOUNDS = 16
NUM_TEXT_THREADS = 4
MAX_WAITING_TEXTS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What registering answers."""

    record: SpeakerRecord
    warnings: tuple[AudioWarning, ...] = ()
    quality: ClipQuality | None = None


class SpeakingEngine(AsyncEngine, Protocol):
    """The part of the host's ``AsyncOmni`` that we use here.

    Attributes:
        request_states: What this process has asked of it and goes on, by the id.
    """

    request_states: dict[str, Any]


class SpeakerService:
    """The speakers of one server; safe beside other servers on the same storage.

    For the event loop only.

    Args:
        engine: The host's engine client; None where there are no workers.
        model: What is served.
        keys: Whose API keys are whose.

    Attributes:
        model: What is served.
        tenants: Whose API keys are whose.
        lookups: Finds speakers.
        encodings: Makes theirs exist.
        kv_warming: Prefills voices that were precomputed.
        uploads: Decodes and stores what comes.
        inline: Clips that come with a request.
        connection: What those that are URLs are fetched with.
        deletions: Removes what was deleted, everywhere.
        prompts: What prompts begin with, by audio.
        texts: Checks texts and builds prompts of them, where that takes long.
        bundles: Exports and imports voices.
        bundling: Runs that, one at a time: a bundle may have 64 MiB.
        exports: Bundles that are being sent.
        archives: The same of archives, which take minutes.
        sounds: The same of reference audio and previews.
        places: Inline references of each tenant that are worked on.
        previews: What voices have said to try them.
        may_download: Whether the operator lets reference audio out.
    """

    def __init__(
        self,
        store: SpeakerStore,
        settings: Settings,
        engine: SpeakingEngine | None,
        model: ServedModel,
        keys: TenantKeys,
        prefill: Prefill | None = None,
    ):
        self.store = store
        self.model = model
        self.tenants = keys
        self.may_download = settings.audio_download
        workers = None if engine is None else AsyncWorkers(engine)
        self._indexed = indexed = Lookups(is_local=store.catalogue.is_local)
        self.lookups = SpeakerLookups(store, indexed, keys)
        self.kv_warming = KVWarming(prefill, is_on=settings.warm_kv == "idle")
        self.encodings = SpeakerEncodings(
            store,
            settings,
            workers,
            model,
            keys,
            indexed,
            self.lookups,
            self.kv_warming,
        )
        self.uploads = Uploads(
            store,
            model.family,
            settings.min_quality,
            lambda: engine is not None and bool(engine.request_states),
        )
        self.inline = InlineClips(
            store,
            indexed,
            max_fetches=settings.max_fetches,
            is_full=lambda: self.encodings.is_full,
        )
        self.connection = FetchConnection(max_waiting=settings.max_fetches)
        self.places = TenantPlaces()
        self.prompts = PromptMemory[Any](PROMPT_MEMORY_MAX_BYTES)
        self.texts = BoundedExecutor(
            "too many texts wait to be read",
            num_threads=NUM_TEXT_THREADS,
            max_waiting=MAX_WAITING_TEXTS,
        )
        self.previews = Previews(
            store, self.lookups.reads, settings.encode_timeout_seconds
        )
        self.bundles = Bundles(store, settings.bundle_key, self.lookups.find_now)
        self.bundling = BoundedExecutor(
            "too many bundles wait", num_threads=1, max_waiting=MAX_BUNDLES
        )
        self.exports = Places("too many bundles are being sent", MAX_BUNDLES)
        self.archives = Places("too many archives are being sent", MAX_ARCHIVES)
        self.sounds = Places("too many clips are being sent", MAX_SOUNDS)
        self._counts = Counts(store, settings, keys, self.lookups.known)
        self._decoders = Decoders(workers, model.family)
        self.deletions = Deletions(
            store,
            indexed,
            self.encodings.cloning_workers,
            self._decoders,
            self.lookups.known,
            self._delete_here,
            self._end_here,
            self._delete_all_here,
        )
        self.metrics = MetricsRefresh(
            process_metrics(),
            store,
            self.encodings.cloning_workers,
            self._decoders,
            lambda: self.encodings.num_flights,
            metrics_directory(),
        )

    def start(self) -> None:
        """Begin what goes on in the background; needs a running event loop."""
        self.tenants.start()
        self.deletions.start()
        self.metrics.start()
        self.encodings.start()

    def shutdown(self) -> None:
        """Let go of threads, tasks and files."""
        # Tasks before the threads that they use.
        self.encodings.shutdown()
        self.kv_warming.shutdown()
        self.tenants.shutdown()
        self.deletions.shutdown()
        self.metrics.shutdown()
        pools = self.inline, self.connection, self.texts, self.uploads
        others = self.bundling, self.lookups, self._indexed
        for threads in pools + others:
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
            self.encodings.precompute_in_background(done.record)
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
        done = await self.uploads.changes.run(
            self.store.change, name, changes, tenant.name, tenant.limits
        )
        is_new = bool(done.record.ref_text) and done.deletion is not None
        await self.registered(done, precompute=is_new)
        return done.record

    # -------- counting

    async def stats(self, caller: Caller) -> dict[str, object]:
        """Count what the caller may know of.

        Without tenants, and for an administrator, that is what is registered and
        stored, and each worker's counters; for one tenant of several what it has.

        Raises: WorkerRPCError, StorageError.
        """
        if self.tenants.is_on and caller.tenant is not None:
            return await self.lookups.reads.run(self._counts.of_tenant, caller.tenant)
        known = await self.lookups.reads.run(self._counts.of_all)
        workers = []
        if (cloning := self.encodings.cloning_workers()) is not None:
            answers = await cloning.call(STATS)
            workers = [answer.shown for answer in answers]
        shown = {**known, "flights": self.encodings.num_flights, "workers": workers}
        if decoders := await self._decoders.stats():
            shown["decoders"] = [answer.shown for answer in decoders]
        if (warming := self.kv_warming.stats()) is not None:
            shown["kv_warming"] = warming
        return shown

    def _delete_here(self, audio_sha256: str) -> None:
        self.prompts.delete(audio_sha256)
        self.inline.delete(audio_sha256)
        self.encodings.delete(audio_sha256)

    def _end_here(self, audio_sha256: str) -> None:
        self.kv_warming.delete(audio_sha256)
        self.encodings.end_waits(audio_sha256)

    def _delete_all_here(self) -> None:
        self.lookups.known.delete_all()
        self.prompts.delete_all()
        self.inline.delete_all()
        self.kv_warming.delete_all()
        self.encodings.delete_all()


def open_service(
    settings: Settings,
    engine: SpeakingEngine | None,
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
