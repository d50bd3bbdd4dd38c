"""Registering, finding and deleting speakers: what routes and adapters call."""

from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

from cachetools import LRUCache

from vllm_tts_cache.catalogue.records import SpeakerChanges, SpeakerRecord
from vllm_tts_cache.config import Settings, metrics_directory
from vllm_tts_cache.entrypoints.metrics import MetricsRefresh, process_metrics
from vllm_tts_cache.entrypoints.speakers.deletions import Deletions
from vllm_tts_cache.entrypoints.speakers.ensure import SpeakerEncodings
from vllm_tts_cache.entrypoints.speakers.executors import (
    BoundedExecutor,
    Slots,
    TenantSlots,
)
from vllm_tts_cache.entrypoints.speakers.inline import InlineClips
from vllm_tts_cache.entrypoints.speakers.kv_warming import KVWarming
from vllm_tts_cache.entrypoints.speakers.lookups import ReadExecutor, SpeakerLookups
from vllm_tts_cache.entrypoints.speakers.registering import Uploads
from vllm_tts_cache.entrypoints.speakers.served_model import ServedModel
from vllm_tts_cache.speaker.rpc_client import DECODER_STATS, STATS, AsyncWorkers
from vllm_tts_cache.store.bundles import Bundles
from vllm_tts_cache.store.opening import open_store
from vllm_tts_cache.store.registering import Registered
from vllm_tts_cache.tenants import Caller, Tenant, TenantKeys

P = TypeVar("P", bound=Any)

# An entry's overhead: key and objects, most of the bytes of a short voice.
_ENTRY_BYTES = 1024

# Of `PromptMemory`, per process: about 5,000 voices of 30 s on Fish Speech.
PROMPT_MEMORY_MAX_BYTES = 16 * 1024 * 1024
MAX_BUNDLES = 4
MAX_SOUNDS = 16
NUM_TEXT_THREADS = 4
MAX_WAITING_TEXTS = 1024


class PromptMemory(Generic[P]):
    """An LRU cache of what prompts begin with, by voice and transcript.

    For the event loop only.

    Args:
        max_bytes: Of all parts together; a larger one is not kept.
    """

    def __init__(self, max_bytes: int):
        # Each with the address of its audio.
        self._parts = LRUCache[Hashable, tuple[str, P]](
            max_bytes, getsizeof=lambda entry: _ENTRY_BYTES + entry[1].num_bytes
        )
        self._num_deletes = 0

    async def get_or_build(
        self, key: Hashable, audio_sha256: str, build: Callable[[], Awaitable[P]]
    ) -> P:
        """Return the part of this key, made by ``build`` if it is not here.

        Raises: whatever ``build`` raises; nothing is kept then.
        """
        if (entry := self._parts.get(key)) is not None:
            return entry[1]
        num_deletes = self._num_deletes
        part = await build()
        # Else a part whose audio was deleted meanwhile would be kept.
        if num_deletes == self._num_deletes:
            with suppress(ValueError):  # it is larger than ``max_bytes``
                self._parts[key] = audio_sha256, part
        return part

    def delete(self, audio_sha256: str) -> None:
        """Delete everything of this audio; what is being built is not kept."""
        self._num_deletes += 1
        for key, (sha, _) in list(self._parts.items()):
            if sha == audio_sha256:
                del self._parts[key]

    def delete_all(self) -> None:
        """Delete everything; what is being built is not kept."""
        self._num_deletes += 1
        self._parts.clear()


class SpeakerService:
    """The speakers of one server; safe beside other servers on the same storage.

    For the event loop only.

    Args:
        speech: The serving class; None where no voice is prefilled.
        memories: Other caches of voices in this process, see `Deletions`.

    Raises: StorageError, ConfigError.

    Attributes:
        texts: Checks texts and builds prompts of them, where that takes long.
        bundling: Runs exports and imports, one at a time: a bundle may have 64 MiB.
        exports: Bounds the bundles that are being sent.
        sounds: Bounds the clips of reference audio that are being sent.
        places: Bounds each tenant's inline references under way.
    """

    def __init__(
        self,
        settings: Settings,
        engine: Any,
        model: ServedModel,
        *,
        speech: Any = None,
        memories: Sequence[Any] = (),
    ):
        self.settings = settings
        self.tenants = TenantKeys(settings.tenants_file)
        self.store = store = open_store(settings)
        self.model = model
        workers = AsyncWorkers(engine)
        self._indexed = indexed = ReadExecutor(is_local=store.is_local)
        self.lookups = SpeakerLookups(store, indexed)
        self.kv_warming = KVWarming(speech if settings.warm_kv == "idle" else None)
        self.encodings = SpeakerEncodings(
            store, settings, workers, model, indexed, self.lookups, self.kv_warming
        )
        self.uploads = Uploads(store, model.family, settings.min_quality)
        self.inline = InlineClips(
            store,
            indexed,
            max_fetches=settings.max_fetches,
            refuses=self.encodings.pending.refuses,
        )
        self.places = TenantSlots()
        self.prompts = PromptMemory[Any](PROMPT_MEMORY_MAX_BYTES)
        self.texts = BoundedExecutor(
            "too many texts wait to be read",
            num_threads=NUM_TEXT_THREADS,
            max_waiting=MAX_WAITING_TEXTS,
        )
        self.bundles = Bundles(store, settings.bundle_key)
        self.bundling = BoundedExecutor(
            "too many bundles wait", num_threads=1, max_waiting=MAX_BUNDLES
        )
        self.exports = Slots("too many bundles are being sent", MAX_BUNDLES)
        self.sounds = Slots("too many clips are being sent", MAX_SOUNDS)
        self.deletions = Deletions(
            store,
            indexed,
            self.encodings,
            model,
            self.lookups.last,
            self.kv_warming,
            memories=(self.prompts, self.inline, self.encodings, *memories),
        )
        self.metrics = MetricsRefresh(
            process_metrics(),
            store,
            self.encodings.cloning_workers,
            model,
            lambda: len(self.encodings.pending),
            metrics_directory(),
        )

    def start(self) -> None:
        """Start the background tasks; needs a running event loop."""
        for each in (self.tenants, self.deletions, self.metrics, self.encodings):
            each.start()

    def shutdown(self) -> None:
        """Stop the tasks and threads, and close the store."""
        # Tasks before the threads that they use.
        tasks = self.encodings, self.kv_warming, self.tenants, self.deletions
        pools = self.inline, self.texts, self.uploads, self.bundling
        for each in (*tasks, self.metrics, *pools, self.lookups, self._indexed):
            each.shutdown()
        self.store.close()

    # -------- registering

    def default_voice(self, tenant: str) -> str:
        """Return the voice of a tenant's requests that name none; empty for none."""
        known = self.tenants.tenants.get(tenant)
        return (self.settings if known is None else known).default_voice

    def registered(self, done: Registered, *, precompute: bool = True) -> None:
        """Delete what a stored voice replaced, and precompute its encodings."""
        if done.deletion is not None:
            self.deletions.carry_out(done.deletion)
        if precompute:
            self.encodings.precompute_from(done.record.generation)
            self.encodings.warm(done.record)

    async def change(
        self, tenant: Tenant, name: str, changes: SpeakerChanges
    ) -> SpeakerRecord:
        """Change a speaker's name, texts, labels or expiry.

        Raises: SpeakerNotFoundError, SpeakerExistsError, InvalidSpeakerError,
            ServerBusyError, StorageError.
        """
        done = await self.uploads.changes.run(
            self.store.registrations.change, name, changes, tenant.name
        )
        if done.deletion is not None:  # it may need other encodings
            self.registered(done)
        return done.record

    # -------- counting

    async def stats(self, caller: Caller) -> dict[str, object]:
        """Return the counts that the caller may see.

        Without tenants, and for an administrator: what is registered and stored, and
        each worker's counters; for one tenant of several: its own registrations.

        Raises: WorkerRPCError, StorageError.
        """
        if self.tenants.is_on and caller.tenant is not None:
            return await self.lookups.reads.run(self._counts_of, caller.tenant)
        known = await self.lookups.reads.run(self._counts)
        shown = {**known, "flights": len(self.encodings.pending), "workers": []}
        if (workers := self.encodings.cloning_workers()) is not None:
            shown["workers"] = [answer.shown for answer in await workers.call(STATS)]
            if decoders := await self.model.call_decoders(workers, DECODER_STATS):
                shown["decoders"] = [answer.shown for answer in decoders]
        if (warming := self.kv_warming.stats()) is not None:
            shown["kv_warming"] = warming
        return shown

    def _counts(self) -> dict[str, object]:
        """Return the counts of all, and of each of several tenants; for a thread."""
        storage: dict[str, object] = {
            segment.value: {
                content: {"files": used.num_files, "bytes": used.num_bytes}
                for content, used in contents.items()
            }
            for segment, contents in self.store.usage().items()
        }
        storage["max_bytes"] = {
            "registered_audio": self.settings.audio_max_bytes,
            "inline_audio": self.settings.inline_audio_max_bytes,
            "encodings": self.settings.disk_max_bytes,
        }
        counts = {
            "registry": {"speakers": self.store.num_speakers()},
            "storage": storage,
            "deletions": {"unfinished": self.store.num_unfinished_deletions()},
        }
        if bucket := self.store.bucket_counts():
            counts["bucket"] = bucket
        if not self.tenants.is_on:
            return counts
        known = self.tenants.tenants
        names = sorted(self.store.usage_of_tenants().keys() | known.keys())
        each = {n: self._counts_of(known.get(n) or Tenant(name=n)) for n in names}
        return {**counts, "tenants": each}

    def _counts_of(self, tenant: Tenant) -> dict[str, object]:
        """Return the counts and limits of one of several tenants; for a thread."""
        used, limits = self.store.usage_of(tenant.name), tenant.limits
        num_left = self.store.num_unfinished_deletions(tenant.name)
        return {
            "registry": {
                "speakers": used.num_voices,
                "consents": used.num_consents,
                "audio_bytes": used.audio_bytes,
            },
            "limits": {
                "speakers": limits.max_voices,
                "consents": limits.max_voices,
                "audio_bytes": limits.max_audio_bytes,
            },
            "deletions": {"unfinished": num_left},
        }
