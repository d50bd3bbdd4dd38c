"""Ensure: the one way an encoding comes to be, seen from the API process."""

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeVar

from cachetools import LRUCache

from vllm_tts_cache.catalogue.records import SpeakerRecord
from vllm_tts_cache.config import Settings
from vllm_tts_cache.entrypoints.speakers.executors import BoundedExecutor
from vllm_tts_cache.entrypoints.speakers.kv_warming import MAX_WAITING, KVWarming
from vllm_tts_cache.entrypoints.speakers.lookups import ReadExecutor, SpeakerLookups
from vllm_tts_cache.entrypoints.speakers.pending import (
    Pending,
    PendingEncodings,
    too_long_in_line,
)
from vllm_tts_cache.entrypoints.speakers.served_model import (
    CannotCloneError,
    ServedModel,
)
from vllm_tts_cache.errors import (
    EncodeError,
    EncodersChangedError,
    GoneError,
    StorageError,
    TTSCacheError,
    WorkerRPCError,
)
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.speaker.reference import EncodingNeed
from vllm_tts_cache.speaker.rpc_client import (
    DESCRIBE,
    ENCODING,
    FAILED,
    LOOK,
    AsyncWorkers,
    ForeignStoreError,
    UnsupportedModelError,
    encoding_of,
    fingerprints_of,
    refuse_elsewhere,
)
from vllm_tts_cache.speaker.wire import (
    EncodingCall,
    FailedCall,
    JobReport,
    JobState,
    LookCall,
)
from vllm_tts_cache.store.encoding import Encoding, EncodingKey
from vllm_tts_cache.store.speaker_store import SpeakerStore, StoredSpeaker
from vllm_tts_cache.tenants import ALONE, Tenant

T = TypeVar("T")
_Made = tuple[EncodingNeed, bool]  # what, and whether it is forced

CacheStatus = Literal["pending", "processing", "ready", "failed", "unsupported"]

logger = logging.getLogger("vllm.vllm_tts_cache")
throttled = ThrottledLog(logger)

# What goes while a prompt is made is resolved anew, as often as a request is submitted.
MAX_TRIES = 3
# After so long a client that is in no hurry is told that they are still being made.
IN_TURN_SECONDS = 10.0
# After a start: not each voice that spoke last can be prefilled.
MAX_LOOKED_AT = 4 * MAX_WAITING
# Of those that are not kept the worker is asked once more.
MAX_FETCHED = 100_000
# Times the timeout, which is that of one encode: a request that others are always
# encoded before is to hear of it while its client still listens.
MAX_TIMEOUTS_IN_LINE = 5
MAX_READS = 1024


def status_of(reports: Sequence[JobReport]) -> tuple[CacheStatus, str | None]:
    """Derive the status of encodings and, of ``failed``, the reason."""
    states = {report.state for report in reports}
    if states and states == {JobState.READY}:
        return "ready", None
    if states & {JobState.QUEUED, JobState.ENCODING}:
        return "processing", None
    for report in reports:
        if report.state in (JobState.FAILED, JobState.NO_AUDIO):
            return "failed", report.reason or "its reference audio is not stored"
    return "pending", None


class SpeakerEncodings:
    """The encodings of one server's speakers; for the event loop only.

    Args:
        store: Where they are.
        settings: How long, and how many may wait. A request waits for five times the
            timeout of an encode in all.
        workers: Who make them; None if the model has none.
        model: What is served.
        lookups: Runs indexed reads.
        speakers: Finds a speaker again whose audio was replaced.
        kv_warming: Prefills voices whose encodings exist.
    """

    def __init__(
        self,
        store: SpeakerStore,
        settings: Settings,
        workers: AsyncWorkers | None,
        model: ServedModel,
        lookups: ReadExecutor,
        speakers: SpeakerLookups,
        kv_warming: KVWarming,
    ):
        self._store = store
        self._workers = workers
        self._model = model
        self._lookups = lookups
        self._speakers = speakers
        self._kv_warming = kv_warming
        self._max_wait_seconds = MAX_TIMEOUTS_IN_LINE * settings.encode_timeout_seconds
        self._pending = None
        if workers is not None:
            self._pending = PendingEncodings(
                workers,
                store,
                lookups,
                timeout_seconds=settings.encode_timeout_seconds,
                max_waiting_inline=settings.max_waiting_inline,
            )
        self._reads = BoundedExecutor(
            "too many encodings are read", num_threads=4, max_waiting=MAX_READS
        )
        self._fingerprints: dict[str, str] | None = None
        self._has_complained = False
        self._is_fetching = False
        self._doubted: set[str] = set()
        # Of an object store's: audio -> encoders whose encoding the worker has fetched.
        self._fetched = LRUCache[str, set[str]](MAX_FETCHED)
        self._background: set[asyncio.Task[Any]] = set()
        self._making: dict[_Made, asyncio.Task[bool | TTSCacheError]] = {}

    @property
    def num_flights(self) -> int:
        """Encodings that callers of this process wait for."""
        return 0 if self._pending is None else len(self._pending)

    @property
    def is_full(self) -> bool:
        """Whether one more inline reference would be refused."""
        return self._pending is not None and self._pending.is_full

    def cloning_workers(self) -> AsyncWorkers | None:
        """Those that encode; None where the model clones nothing, or has none."""
        return None if self._model.family() is None else self._workers

    def start(self) -> None:
        """Ask the workers for their encoders; needs a running event loop."""
        self._fetch_fingerprints()

    async def settled(self) -> None:
        """Return when nothing goes on in the background."""
        while self._background:
            await asyncio.wait(set(self._background))

    def shutdown(self) -> None:
        """Let go of tasks and threads; who waits is told that the server is busy."""
        for task in self._background:
            task.cancel()
        if self._pending is not None:
            self._pending.shutdown()
        self._reads.shutdown()

    # -------- the workers' encoders

    async def fingerprints(self) -> dict[str, str]:
        """Encoder name -> fingerprint, asked of the workers until they have others.

        Raises: WorkerRPCError if they cannot say, do not agree, or read elsewhere;
            CannotCloneError if there are none.
        """
        if self._fingerprints is None:
            answers = await self._cloning().call(DESCRIBE)
            refuse_elsewhere(answers, self._store.store_id)
            self._fingerprints = fingerprints_of(answers)
        return self._fingerprints

    @property
    def knows_encoders(self) -> bool:
        """Whether voices can be cloned here, if the model clones any.

        If not, the workers are asked once more.
        """
        if self.cloning_workers() is None or self._fingerprints is not None:
            return True
        self._fetch_fingerprints()
        return False

    async def keys(self, need: EncodingNeed) -> list[EncodingKey]:
        """Return the keys under which the workers' encoders keep the encodings.

        Raises: As `fingerprints`.
        """
        fingerprints = await self.fingerprints()
        return [
            EncodingKey(
                audio_sha256=need.ref.audio_sha256,
                encoder_fingerprint=fingerprints[name],
            )
            for name in need.encoder_names
        ]

    # -------- any encodings

    async def ensure(
        self,
        need: EncodingNeed,
        *,
        tenant: str = ALONE.name,
        stored: frozenset[str] | None = None,
        urgent: bool = True,
        force: bool = False,
    ) -> bool:
        """Return when the worker can have the encodings; True if they existed.

        A caller that leaves withdraws what nobody else waits for.

        Args:
            need: Which encodings.
            tenant: In whose turn they are made.
            stored: Fingerprints of the audio's encodings that are stored, if the
                caller has looked that up; None to look it up.
            urgent: Whether a request waits.
            force: Encode anew what exists; whoever uses it keeps it until then.

        Raises:
            AudioGoneError: The audio is not stored (any more).
            EncodersChangedError: The workers have other encoders by now.
            EncodeError: An encoder failed; the next call tries again.
            EncodeTimeoutError: It took too long; it may still be under way.
            ServerBusyError: Too many inline references wait, or a request has waited
                for too long although others are encoded.
            WorkerRPCError: The workers could not be asked.
        """
        keys = await self.keys(need)
        sha = need.ref.audio_sha256
        missing, absent = keys, keys
        if not force:
            missing = await self._missing(keys, sha, stored)
            absent = missing
            if self._store.copies is not None:
                absent = [key for key in keys if key in missing or not self._had(key)]
        if not absent:
            return True
        await self._wait(absent, need, tenant, urgent=urgent, force=force)
        self._doubted.discard(sha)
        if self._store.copies is not None:
            had = self._fetched.setdefault(sha, set())
            had.update(key.encoder_fingerprint for key in absent)
        return not missing

    def recheck(self, audio_sha256: str) -> None:
        """Let the worker look at this audio's files once more: a prompt was missing."""
        self._doubted.add(audio_sha256)

    async def encoding(self, key: EncodingKey) -> Encoding:
        """Return an encoding that `ensure` has made sure of.

        Raises:
            GoneError: It is gone again, or the worker's copy is damaged.
            ServerBusyError: Too many are read.
            WorkerRPCError: The workers could not be asked.
        """
        if (found := await self._reads.run(self._read, key)) is not None:
            return found
        # The disk did not take it, or does not give it: that costs time only.
        call = EncodingCall(key.audio_sha256, key.encoder_fingerprint)
        answers = await self._cloning().call(ENCODING, call)
        try:
            return encoding_of(answers, key)
        except EncodeError as exc:
            if await self._lookups.run(self._store.has_audio, key.audio_sha256):
                self.recheck(key.audio_sha256)
            raise GoneError(str(exc)) from exc

    async def cause_of_failure(self, request_id: str) -> str | None:
        """Return why the engine ended a request, if it was for want of its prompt."""
        call = FailedCall(request_ids=[request_id])
        try:
            answers = await self._cloning().call(FAILED, call)
        except WorkerRPCError as exc:
            throttled.warn_of("asking for causes", "Asking why it failed: %s", exc)
            return None
        causes = (answer.causes.get(request_id) for answer in answers)  # not its alone
        return next(filter(None, causes), None)

    def delete(self, audio_sha256: str) -> None:
        """Delete what is remembered of one audio."""
        self._doubted.discard(audio_sha256)
        self._fetched.pop(audio_sha256, None)

    def delete_all(self) -> None:
        """Delete what is remembered of all."""
        self._doubted.clear()
        self._fetched.clear()

    def end_waits(self, audio_sha256: str) -> None:
        """End what waits for encodings of an audio that is gone, behind many others."""
        for fingerprint in (self._fingerprints or {}).values():
            assert self._pending is not None  # it has asked for fingerprints
            key = EncodingKey(
                audio_sha256=audio_sha256, encoder_fingerprint=fingerprint
            )
            self._pending.end(key)

    # -------- those of registered speakers

    async def precompute(
        self, found: StoredSpeaker, *, force: bool = False, urgent: bool = True
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
            `ensure`.
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

    async def status(self, found: StoredSpeaker) -> tuple[CacheStatus, str | None]:
        """Derive the speaker's status and, of what cannot be ``ready``, the reason.

        Raises: WorkerRPCError, StorageError.
        """
        try:
            self._model.check_clones()
            if found.record.audio_sha256 is None:
                return "ready", None
            need = self._model.need_of(found.record)
            return await self.status_of_need(need, found.fingerprints)
        except CannotCloneError as exc:
            return "unsupported", str(exc)
        except UnsupportedModelError:
            return "unsupported", self._model.reason

    async def status_of_need(
        self, need: EncodingNeed, stored: frozenset[str]
    ) -> tuple[CacheStatus, str | None]:
        """Derive the status and, of ``failed``, the reason.

        Args:
            need: Which encodings.
            stored: Fingerprints of the audio's encodings that are stored.
        """
        keys = await self.keys(need)
        missing = [key for key in keys if key.encoder_fingerprint not in stored]
        if not missing:
            return "ready", None
        if self._pending is not None and any(key in self._pending for key in missing):
            return "processing", None
        wanted = [(key.audio_sha256, key.encoder_fingerprint) for key in missing]
        answers = await self._cloning().call(LOOK, LookCall(wanted))
        # Rank 0 encodes; the call may have asked for others as well.
        reports = [r for answer in answers if answer.rank == 0 for r in answer.reports]
        return status_of([report for report in reports if report.key in wanted])

    # -------- how

    def _cloning(self) -> AsyncWorkers:
        """Return those that encode. Raises: CannotCloneError."""
        if self._workers is None:
            raise self._model.cannot_clone()
        return self._workers

    def _had(self, key: EncodingKey) -> bool:
        """Whether the worker has had what the bucket has."""
        return key.encoder_fingerprint in self._fetched.get(key.audio_sha256, ())

    def _read(self, key: EncodingKey) -> Encoding | None:
        try:
            return self._store.read(key)
        except StorageError as exc:
            throttled.warn_of("reading an encoding", "%s", exc.log_text)
            return None

    async def _missing(
        self,
        keys: Iterable[EncodingKey],
        audio_sha256: str,
        stored: frozenset[str] | None,
    ) -> list[EncodingKey]:
        if audio_sha256 in self._doubted:
            return list(keys)
        if stored is None:
            look = self._store.stored_kinds
            stored = (await self._lookups.run(look, [audio_sha256]))[audio_sha256]
        return [key for key in keys if key.encoder_fingerprint not in stored]

    async def _wait(
        self,
        keys: Sequence[EncodingKey],
        need: EncodingNeed,
        tenant: str,
        *,
        urgent: bool,
        force: bool,
    ) -> None:
        assert self._pending is not None  # there are keys
        sha, segment = need.ref.audio_sha256, need.ref.segment
        # What is stored elsewhere is the worker's to fetch.
        only_worker = self._store.copies is not None or sha in self._doubted
        pending: list[Pending] = []
        try:
            for key in keys:
                joined = self._pending.join(
                    key,
                    segment,
                    tenant=tenant,
                    # What exists is made anew in its turn: anybody may ask for that,
                    # of any voice.
                    urgent=urgent and not force,
                    force=force,
                    only_worker=only_worker,
                )
                pending.append(joined)
            await self._landed(pending, self._max_wait_seconds if urgent else None)
        except EncodersChangedError:
            self._fingerprints = None
            raise
        finally:
            for each in pending:
                self._pending.leave(each)

    @staticmethod
    async def _landed(pending: Sequence[Pending], max_seconds: float | None) -> None:
        # It cancels none of them: others wait for them too.
        landings = [each.landed for each in pending]
        first = asyncio.FIRST_EXCEPTION
        await asyncio.wait(landings, timeout=max_seconds, return_when=first)
        done = [landed for landed in landings if landed.done()]
        for landed in done:
            landed.result()
        if max_seconds is not None and len(done) < len(landings):
            raise too_long_in_line(max_seconds)

    async def _precompute(self, found: StoredSpeaker, *, force: bool) -> bool:
        self._model.check_clones()
        record, stored = found.record, found.fingerprints
        if record.audio_sha256 is None:
            existed = True
        else:
            need = self._model.need_of(record)
            existed = await self.ensure(
                need, tenant=record.tenant, stored=stored, force=force
            )
        self._kv_warming.add(record)
        return existed

    async def _precompute_in_turn(
        self, found: StoredSpeaker, *, force: bool
    ) -> bool | None:
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
        key = need, force
        if (making := self._making.get(key)) is None:
            work = self._ensured_and_warm(record, need, force=force)
            self._making[key] = making = self._in_background(work)
            making.add_done_callback(lambda _: self._making.pop(key))
        return making

    async def _ensured_and_warm(
        self, record: SpeakerRecord, need: EncodingNeed, *, force: bool
    ) -> bool:
        existed = await self.ensure(
            need, tenant=record.tenant, urgent=False, force=force
        )
        self._kv_warming.add(record)
        return existed

    def _fetch_fingerprints(self) -> None:
        if not self._is_fetching:
            self._is_fetching = True
            self._in_background(self._fetched_and_warm())

    async def _fetched_and_warm(self) -> None:
        """Ask before anybody needs it; log at once if the workers read elsewhere."""
        try:
            # By now the serving class, which starts this, knows its family.
            if self.cloning_workers() is not None:
                await self.fingerprints()
                await self._warm_last_used()
        except ForeignStoreError as exc:
            if not self._has_complained:
                logger.error("%s", exc)
            self._has_complained = True
        except WorkerRPCError as exc:  # it may not be served yet
            logger.debug("At start: %s", exc)
        finally:
            self._is_fetching = False

    async def _warm_last_used(self) -> None:
        """Have the voices prefilled that spoke before the engine was started."""
        if not self._kv_warming.is_possible:
            return
        last_used, num_left = self._store.last_used, MAX_WAITING
        for tenant, name in await self._speakers.reads.run(last_used, MAX_LOOKED_AT):
            found = await self._speakers.find(Tenant(name=tenant), name)
            if found is not None and await self.status(found) == ("ready", None):
                num_left -= self._kv_warming.add(found.record)
            if not num_left:
                return

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
