"""Having speakers' encodings: at once, in the background, and how far they are."""

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from vllm_tts_cache.catalogue.record import SpeakerRecord
from vllm_tts_cache.config import Settings
from vllm_tts_cache.entrypoints.ensure import EncodingNeed, Ensurer
from vllm_tts_cache.entrypoints.executors import Lookups
from vllm_tts_cache.entrypoints.kv_warming import MAX_AGAIN, KVWarming
from vllm_tts_cache.entrypoints.served_model import CannotCloneError, ServedModel
from vllm_tts_cache.entrypoints.speaker_lookups import SpeakerLookups
from vllm_tts_cache.entrypoints.status import CacheStatus
from vllm_tts_cache.entrypoints.tenant_keys import TenantKeys
from vllm_tts_cache.entrypoints.told import ToldEnsurer
from vllm_tts_cache.entrypoints.wants import MAX_TRIES, GoneError
from vllm_tts_cache.errors import TTSCacheError
from vllm_tts_cache.speaker.rpc_client import AsyncWorkers, UnsupportedModelError
from vllm_tts_cache.store.speaker_store import Found, SpeakerStore
from vllm_tts_cache.tenants import DEFAULT_TENANT, Tenant
from vllm_tts_cache.throttled_log import ThrottledLog

throttled = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))

# After so long a client that is in no hurry is told that they are still being made.
IN_TURN_SECONDS = 10.0
# After a start: not each voice that spoke last can be prefilled.
MAX_LOOKED_AT = 4 * MAX_AGAIN

T = TypeVar("T")
_Made = tuple[str, EncodingNeed, bool]  # whose, what, and whether it is forced


class SpeakerEncodings:
    """The encodings of one server's speakers; for the event loop only.

    Args:
        store: Where they are.
        settings: How long, and how many may wait.
        workers: Who make them; None if the model has none.
        model: What is served.
        keys: Whose API keys are whose.
        lookups: Runs indexed reads.
        speakers: Finds a speaker again whose audio was replaced.
        kv_warming: Prefills voices that were precomputed.
    """

    def __init__(
        self,
        store: SpeakerStore,
        settings: Settings,
        workers: AsyncWorkers | None,
        model: ServedModel,
        keys: TenantKeys,
        lookups: Lookups,
        speakers: SpeakerLookups,
        kv_warming: KVWarming,
    ):
        self._store = store
        self._workers = workers
        self._model = model
        self._keys = keys
        self._speakers = speakers
        self._kv_warming = kv_warming
        self._told = ToldEnsurer(store, lookups)
        self._background: set[asyncio.Task[Any]] = set()
        self._making: dict[_Made, asyncio.Task[bool | TTSCacheError]] = {}
        self._is_introducing = False
        self._has_warmed = False
        self._ensurer = None
        if workers is not None:
            self._ensurer = Ensurer(
                workers,
                store,
                lookups,
                timeout_seconds=settings.encode_timeout_seconds,
                max_waiting_inline=settings.max_waiting_inline,
            )

    @property
    def ensurer(self) -> Ensurer:
        """What makes encodings exist.

        Raises: CannotCloneError.
        """
        if self._ensurer is None or self._model.family() is None:
            raise self._model.cannot_clone()
        return self._ensurer

    @property
    def num_flights(self) -> int:
        """Encodings that are waited for."""
        return 0 if self._ensurer is None else self._ensurer.num_flights

    @property
    def is_full(self) -> bool:
        """Whether one more inline reference would be refused."""
        return self._ensurer is not None and self._ensurer.is_full

    @property
    def knows_encoders(self) -> bool:
        """Whether voices can be cloned here, if the model clones any.

        If not, the workers are asked once more.
        """
        if self.cloning_workers() is None:
            return True
        if self.ensurer.is_introduced:
            self._warm_once()
            return True
        self._introduce()
        return False

    def cloning_workers(self) -> AsyncWorkers | None:
        """Those that encode; None where the model clones nothing, or has none."""
        return None if self._model.family() is None else self._workers

    def start(self) -> None:
        """Ask the workers for their encoders; needs a running event loop."""
        self._introduce()
        if self._keys.is_on:
            self._in_background(self._take_in())

    async def settled(self) -> None:
        """Return when nothing goes on in the background."""
        while self._background:
            await asyncio.wait(set(self._background))

    def shutdown(self) -> None:
        """Let go of tasks and threads."""
        for task in self._background:
            task.cancel()
        if self._ensurer is not None:
            self._ensurer.shutdown()
        self._told.shutdown()

    async def precompute(
        self, found: Found, *, force: bool = False, urgent: bool = True
    ) -> bool | None:
        """Make the speaker's encodings exist; True if they already did.

        Args:
            found: The speaker.
            force: Encode anew what exists.
            urgent: Whether to wait until they do. If not they are made in the
                background, as after a registration, and waited for a while.

        Returns: None if they are still being made.

        Raises: SpeakerNotFoundError if it is deleted meanwhile, SpeakerReplacedError
            if it is replaced again and again, CannotCloneError, and as
            `Ensurer.ensure`.
        """
        tenant, name = Tenant(name=found.record.tenant), found.record.name
        make = self._precompute if urgent else self._precompute_in_turn
        for _ in range(MAX_TRIES - 1):
            try:
                return await make(found, force=force)
            except GoneError:
                found = await self._speakers.get(tenant, name)
        try:
            return await make(found, force=force)
        except GoneError:
            sha = found.record.audio_sha256
            await self._speakers.check_stays(tenant, name, sha)
            raise

    def precompute_in_background(self, record: SpeakerRecord) -> None:
        """Begin to make them, where the model that is served can."""
        if self.cloning_workers() is None:
            return
        with suppress(CannotCloneError):  # registered where another model was served
            self._begin(record, self._model.need_of(record), force=False)

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
            stored: What a look-up said of them; None if nobody has looked.
            urgent: As of `Ensurer.ensure`.
            force: Encode anew what exists.

        Raises: CannotCloneError, and as `Ensurer.ensure`.
        """
        how = {"urgent": urgent, "force": force}
        if stored is not None and not await self._covers(stored, need):
            stored = None
        if not self._keys.is_on:
            return await self.ensurer.ensure(need, stored=stored, **how)
        return await self._told.ensure(self.ensurer, tenant, need, told=stored, **how)

    async def status(self, found: Found) -> tuple[CacheStatus, str | None]:
        """Derive the speaker's status and, of what cannot be ``ready``, the reason.

        Raises: WorkerRPCError, StorageError.
        """
        try:
            self._model.check_clones()
            if found.record.audio_sha256 is None:
                return "ready", None
            need, stored = self._model.need_of(found.record), found.fingerprints
            if not self._keys.is_on:
                return await self.ensurer.status(need, stored)
            tenant = found.record.tenant
            return await self._told.status(self.ensurer, tenant, need, stored)
        except CannotCloneError as exc:
            return "unsupported", str(exc)
        except UnsupportedModelError:
            return "unsupported", self._model.reason

    def delete(self, audio_sha256: str) -> None:
        """Delete what is remembered of one audio."""
        if self._ensurer is not None:
            self._ensurer.delete(audio_sha256)

    def end_waits(self, audio_sha256: str) -> None:
        """End what waits for encodings of an audio that is gone, behind many others."""
        if self._ensurer is not None:
            self._ensurer.end_waits(audio_sha256)

    def delete_all(self) -> None:
        """Delete what is remembered of all."""
        if self._ensurer is not None:
            self._ensurer.delete_all()

    # -------- how

    async def _precompute(self, found: Found, *, force: bool) -> bool:
        self._model.check_clones()
        record, stored = found.record, found.fingerprints
        if record.audio_sha256 is None:
            existed = True
        else:
            need = self._model.need_of(record)
            existed = await self.ensure(record.tenant, need, stored=stored, force=force)
        self._kv_warming.add(record)
        return existed

    async def _precompute_in_turn(self, found: Found, *, force: bool) -> bool | None:
        self._model.check_clones()
        record = found.record
        if record.audio_sha256 is None:
            return await self._precompute(found, force=force)
        making = self._begin(record, self._model.need_of(record), force=force)
        await asyncio.wait([making], timeout=IN_TURN_SECONDS)
        if not making.done():
            return None
        if isinstance(made := making.result(), TTSCacheError):
            raise made
        return made

    def _begin(
        self, record: SpeakerRecord, need: EncodingNeed, *, force: bool
    ) -> "asyncio.Task[bool | TTSCacheError]":
        """Have them made in the background, once for all who ask."""
        key = record.tenant, need, force
        if (making := self._making.get(key)) is None:
            work = self._ensured_and_warm(record, need, force=force)
            self._making[key] = making = self._in_background(work)
            making.add_done_callback(lambda _: self._making.pop(key))
        return making

    async def _covers(self, stored: frozenset[str], need: EncodingNeed) -> bool:
        """Whether what a look-up said is to be believed: it may be of some time ago."""
        if self._store.catalogue.is_local:  # where nothing is remembered
            return True
        keys = await self.ensurer.keys(need)
        return all(key.encoder_fingerprint in stored for key in keys)

    async def _ensured_and_warm(
        self, record: SpeakerRecord, need: EncodingNeed, *, force: bool
    ) -> bool:
        existed = await self.ensure(record.tenant, need, urgent=False, force=force)
        self._kv_warming.add(record)
        return existed

    def _introduce(self) -> None:
        async def introduce() -> None:
            # By now the serving class, which starts this, knows its family.
            try:
                if self.cloning_workers() is not None:
                    await self.ensurer.introduce()
                    if self.ensurer.is_introduced:
                        self._warm_once()
            finally:
                self._is_introducing = False

        if not self._is_introducing:
            self._is_introducing = True
            self._in_background(introduce())

    def _warm_once(self) -> None:
        if not self._has_warmed:
            self._has_warmed = True
            self._in_background(self._warm_again())

    async def _warm_again(self) -> None:
        """Prefill the voices that spoke before the engine was started, if they can."""
        if not self._kv_warming.is_possible:
            return
        last_used, num_left = self._store.catalogue.last_used, MAX_AGAIN
        for tenant, name in await self._speakers.reads.run(last_used, MAX_LOOKED_AT):
            if not num_left or self._kv_warming.is_full:
                return
            found = await self._speakers.find(Tenant(name=tenant), name)
            if found is not None and await self.status(found) == ("ready", None):
                num_left -= self._kv_warming.add(found.record)

    async def _take_in(self) -> None:
        # Whoever was alone before there were tenants knows of its own encodings.
        take_in = self._store.take_tenant_in
        await self._speakers.reads.run(take_in, DEFAULT_TENANT)

    def _in_background(
        self, work: Coroutine[Any, Any, T]
    ) -> "asyncio.Task[T | TTSCacheError]":
        async def run() -> T | TTSCacheError:
            try:
                return await work
            except TTSCacheError as exc:  # the next request that needs it says it
                throttled.warn_of("precomputing", "In the background: %s", exc.log_text)
                return exc

        task = asyncio.create_task(run())
        self._background.add(task)  # the loop itself keeps only a weak reference
        task.add_done_callback(self._background.discard)
        # One that is cancelled before it began would leave it unawaited.
        task.add_done_callback(lambda _task: work.close())
        return task
