"""Ensure: the one way an encoding comes to be, seen from the API process.

`Ensurer` has encodings made, `SpeakerEncodings` those of registered speakers: at once,
in the background, and how far they are.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeVar

from cachetools import LRUCache

from vllm_tts_cache.catalogue.records import SpeakerRecord
from vllm_tts_cache.config import Settings
from vllm_tts_cache.entrypoints.speakers.executors import BoundedExecutor
from vllm_tts_cache.entrypoints.speakers.kv_warming import MAX_WAITING, KVWarming
from vllm_tts_cache.entrypoints.speakers.lookups import ReadExecutor, SpeakerLookups
from vllm_tts_cache.entrypoints.speakers.poller import EncodePoller, reports_of
from vllm_tts_cache.entrypoints.speakers.served_model import (
    CannotCloneError,
    ServedModel,
)
from vllm_tts_cache.entrypoints.speakers.wants import (
    MAX_TRIES,
    GoneError,
    Want,
    too_long_in_line,
)
from vllm_tts_cache.errors import (
    EncodeError,
    StorageError,
    TTSCacheError,
    WorkerRPCError,
)
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.speaker import wire
from vllm_tts_cache.speaker.reference import EncodingNeed, SpeakerRef
from vllm_tts_cache.speaker.rpc_client import (
    DESCRIBE,
    ENCODING,
    FAILED,
    WANT,
    AsyncWorkers,
    ForeignStoreError,
    UnsupportedModelError,
    encoding_of,
    fingerprints_of,
    refuse_elsewhere,
)
from vllm_tts_cache.speaker.wire import JobReport, JobState
from vllm_tts_cache.store.encoding import Encoding, EncodingKey
from vllm_tts_cache.store.speaker_store import SpeakerStore, StoredSpeaker
from vllm_tts_cache.tenants import Tenant

# After so long a client that is in no hurry is told that they are still being made.
IN_TURN_SECONDS = 10.0
# After a start: not each voice that spoke last can be prefilled.
MAX_LOOKED_AT = 4 * MAX_WAITING

T = TypeVar("T")
_Made = tuple[EncodingNeed, bool]  # what, and whether it is forced

CacheStatus = Literal["pending", "processing", "ready", "failed", "unsupported"]

MAX_LOOKS = 64
LOOKS_SECONDS = 0.5

Reports = dict[tuple[str, str], list[JobReport]]

logger = logging.getLogger("vllm.vllm_tts_cache")
throttled = ThrottledLog(logger)

# Of those that are not kept the worker is asked once more.
MAX_FETCHED = 100_000
# Times the timeout, which is that of one encode: a request that others are always
# encoded before is to hear of it while its client still listens.
MAX_TIMEOUTS_IN_LINE = 5
MAX_READS = 1024


class StatusLooks:
    """Asks the workers how far encodings are that nobody of this process waits for.

    All who ask within half a second are told by one RPC. For the event loop only.
    """

    def __init__(self, workers: AsyncWorkers):
        self._workers = workers
        self._wanted: dict[tuple[str, str], wire.Want] = {}
        self._next: asyncio.Task[Reports] | None = None
        self._asked_at = -LOOKS_SECONDS
        self._turn = asyncio.Lock()

    async def look(
        self, ref: SpeakerRef, encoder_names: Iterable[str]
    ) -> list[JobReport]:
        """Return what the workers say of these encodings of one audio.

        Raises: WorkerRPCError.
        """
        while self._next is not None and len(self._wanted) >= MAX_LOOKS:
            await asyncio.wait([self._next])
        names = list(encoder_names)
        for name in names:
            self._wanted[ref.audio_sha256, name] = wire.Want(
                audio_sha256=ref.audio_sha256, encoder=name, segment=ref.segment.value
            )
        if self._next is None:
            self._next = asyncio.create_task(self._ask())
            self._next.add_done_callback(_retrieve)
        reports = await asyncio.shield(self._next)
        return [r for name in names for r in reports.get((ref.audio_sha256, name), [])]

    async def _ask(self) -> Reports:
        async with self._turn:  # a busy worker answers late
            wait = self._asked_at + LOOKS_SECONDS - time.monotonic()
            await asyncio.sleep(max(0.0, wait))
            wanted, self._wanted, self._next = self._wanted, {}, None
            self._asked_at = time.monotonic()
            # A lease of no seconds: tell, and encode nothing.
            call = wire.WantCall(wants=list(wanted.values()), lease_seconds=0.0)
            return reports_of(await self._workers.call(WANT, call))


def status_of(reports: list[JobReport]) -> tuple[CacheStatus, str | None]:
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


def _retrieve(task: "asyncio.Task[Reports]") -> None:
    if not task.cancelled():
        task.exception()  # all who asked may have left


class Ensurer:
    """Makes encodings exist: one want per encoding, however many callers wait for it.

    For the event loop only.

    Args:
        timeout_seconds: Longest encode, and longest time without any progress of the
            worker, that a caller waits for. A request waits five times as long in all.
        max_waiting_inline: Inline encodings that callers of this process may wait for
            at once.
    """

    def __init__(
        self,
        workers: AsyncWorkers,
        store: SpeakerStore,
        lookups: ReadExecutor,
        *,
        timeout_seconds: float,
        max_waiting_inline: int,
    ):
        self._workers = workers
        self._store = store
        self._lookups = lookups
        self._poller = EncodePoller(
            workers,
            store,
            lookups,
            timeout_seconds=timeout_seconds,
            max_waiting_inline=max_waiting_inline,
        )
        self._max_wait_seconds = MAX_TIMEOUTS_IN_LINE * timeout_seconds
        self._fingerprints: dict[str, str] | None = None
        self._has_complained = False
        self._reads = BoundedExecutor(
            "too many encodings are read", num_threads=4, max_waiting=MAX_READS
        )
        self._looks = StatusLooks(workers)
        self._doubted: set[str] = set()
        # Of an object store's: audio -> encoders whose encoding the worker has fetched.
        self._fetched = LRUCache[str, set[str]](MAX_FETCHED)

    @property
    def num_flights(self) -> int:
        """Encodings that callers of this process wait for."""
        return len(self._poller)

    @property
    def is_full(self) -> bool:
        """Whether one more inline reference would be refused."""
        return self._poller.is_full

    async def fingerprints(self) -> dict[str, str]:
        """Encoder name -> fingerprint, asked of the workers once.

        Raises: WorkerRPCError if they cannot say, do not agree, or read elsewhere.
        """
        if self._fingerprints is None:
            answers = await self._workers.call(DESCRIBE)
            refuse_elsewhere(answers, self._store.store_id)
            self._fingerprints = fingerprints_of(answers)
        return self._fingerprints

    @property
    def knows_fingerprints(self) -> bool:
        """Whether the workers have said which encoders they have."""
        return self._fingerprints is not None

    async def fetch_fingerprints(self) -> None:
        """Ask before anybody needs it; log at once if the workers read elsewhere."""
        try:
            await self.fingerprints()
        except ForeignStoreError as exc:
            if not self._has_complained:
                logger.error("%s", exc)
            self._has_complained = True
        except WorkerRPCError as exc:  # it may not be served yet
            logger.debug("At start: %s", exc)

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

    async def ensure(
        self,
        need: EncodingNeed,
        *,
        stored: frozenset[str] | None = None,
        urgent: bool = True,
        force: bool = False,
    ) -> bool:
        """Return when the worker can have the encodings; True if they existed.

        A caller that leaves withdraws what nobody else waits for.

        Args:
            need: Which encodings.
            stored: Fingerprints of the audio's encodings that are stored, if the
                caller has looked that up; None to look it up.
            urgent: Whether a request waits.
            force: Encode anew what exists; whoever uses it keeps it until then.

        Raises:
            AudioGoneError: The audio is not stored (any more).
            EncodeError: An encoder failed; the next call tries again.
            EncodeTimeoutError: It took too long; it may still be under way.
            ServerBusyError: Too many inline references wait, or a request has waited
                for too long although others are encoded.
            WorkerRPCError: The workers could not be asked.
        """
        keys = dict(zip(await self.keys(need), need.encoder_names, strict=True))
        sha = need.ref.audio_sha256
        missing, absent = list(keys), list(keys)
        if not force:
            missing = await self._missing(keys, sha, stored)
            absent = missing
            if self._store.copies is not None:
                absent = [key for key in keys if key in missing or not self._had(key)]
        if not absent:
            return True
        wanted = {key: keys[key] for key in absent}
        await self._wait(wanted, need.ref, urgent=urgent, force=force)
        self._doubted.discard(sha)
        self._note_here(wanted)
        return not missing

    def recheck(self, audio_sha256: str) -> None:
        """Let the worker look at this audio's files once more: a prompt was missing."""
        self._doubted.add(audio_sha256)

    def delete(self, audio_sha256: str) -> None:
        """Doubt it no longer: it was deleted."""
        self._doubted.discard(audio_sha256)
        self._fetched.pop(audio_sha256, None)

    def end_waits(self, audio_sha256: str) -> None:
        """Tell who waits for this audio's encodings that it is not stored any more."""
        for fingerprint in (self._fingerprints or {}).values():
            key = EncodingKey(
                audio_sha256=audio_sha256, encoder_fingerprint=fingerprint
            )
            self._poller.end(key)

    def _had(self, key: EncodingKey) -> bool:
        """Whether the worker has had what the bucket has."""
        return key.encoder_fingerprint in self._fetched.get(key.audio_sha256, ())

    def _note_here(self, keys: Iterable[EncodingKey]) -> None:
        if self._store.copies is None:
            return
        for key in keys:
            had = self._fetched.setdefault(key.audio_sha256, set())
            had.add(key.encoder_fingerprint)

    def delete_all(self) -> None:
        """Doubt none any longer, and know of none that a worker has it."""
        self._doubted.clear()
        self._fetched.clear()

    async def status(
        self, need: EncodingNeed, stored: frozenset[str]
    ) -> tuple[CacheStatus, str | None]:
        """Derive the status and, of ``failed``, the reason.

        Args:
            need: Which encodings.
            stored: Fingerprints of the audio's encodings that are stored.
        """
        named = zip(await self.keys(need), need.encoder_names, strict=True)
        missing = {k: n for k, n in named if k.encoder_fingerprint not in stored}
        if not missing:
            return "ready", None
        if any(key in self._poller for key in missing):
            return "processing", None
        return status_of(await self._looks.look(need.ref, missing.values()))

    async def encoding(self, key: EncodingKey, encoder_name: str) -> Encoding:
        """Return an encoding that `ensure` has made sure of.

        Raises:
            GoneError: It is gone again, or the worker's copy is damaged.
            ServerBusyError: Too many are read.
            WorkerRPCError: The workers could not be asked.
        """
        if (found := await self._reads.run(self._read, key)) is not None:
            return found
        # The disk did not take it, or does not give it: that costs time only.
        call = wire.EncodingCall(audio_sha256=key.audio_sha256, encoder=encoder_name)
        answers = await self._workers.call(ENCODING, call)
        try:
            return encoding_of(answers, key)
        except EncodeError as exc:
            if await self._lookups.run(self._store.has_audio, key.audio_sha256):
                self.recheck(key.audio_sha256)
            raise GoneError(str(exc)) from exc

    async def cause_of_failure(self, request_id: str) -> str | None:
        """Return why the engine ended a request, if it was for want of its prompt."""
        call = wire.FailedCall(request_ids=[request_id])
        try:
            answers = await self._workers.call(FAILED, call)
        except WorkerRPCError as exc:
            throttled.warn_of("asking for causes", "Asking why it failed: %s", exc)
            return None
        causes = (answer.causes.get(request_id) for answer in answers)  # not its alone
        return next(filter(None, causes), None)

    def shutdown(self) -> None:
        """Stop asking.

        Whoever waits, or comes later, is told that the server is busy.
        """
        self._poller.shutdown()
        self._reads.shutdown()

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
        keys: Mapping[EncodingKey, str],
        ref: SpeakerRef,
        *,
        urgent: bool,
        force: bool,
    ) -> None:
        wants: list[Want] = []
        # What exists is made anew in its turn: anybody may ask for that, of any voice.
        goes_first = urgent and not force
        try:
            for key, encoder in keys.items():
                want = self._poller.join(
                    key,
                    encoder,
                    ref.segment,
                    urgent=goes_first,
                    force=force,
                    # What is stored elsewhere is the worker's to fetch.
                    is_doubted=self._store.copies is not None
                    or ref.audio_sha256 in self._doubted,
                )
                wants.append(want)
            await self._landed(wants, self._max_wait_seconds if urgent else None)
        finally:
            for want in wants:
                self._poller.leave(want, urgent=goes_first)

    @staticmethod
    async def _landed(wants: Sequence[Want], max_seconds: float | None) -> None:
        # It cancels none of them: others wait for them too.
        landings = [want.landed for want in wants]
        first = asyncio.FIRST_EXCEPTION
        await asyncio.wait(landings, timeout=max_seconds, return_when=first)
        done = [landed for landed in landings if landed.done()]
        for landed in done:
            landed.result()
        if max_seconds is not None and len(done) < len(landings):
            raise too_long_in_line(max_seconds)


class SpeakerEncodings:
    """The encodings of one server's speakers; for the event loop only.

    Args:
        store: Where they are.
        settings: How long, and how many may wait.
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
        self._speakers = speakers
        self._kv_warming = kv_warming
        self._background: set[asyncio.Task[Any]] = set()
        self._making: dict[_Made, asyncio.Task[bool | TTSCacheError]] = {}
        self._is_fetching = False
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
        if self.ensurer.knows_fingerprints:
            return True
        self._fetch_fingerprints()
        return False

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
        """Let go of tasks and threads."""
        for task in self._background:
            task.cancel()
        if self._ensurer is not None:
            self._ensurer.shutdown()

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

    async def status(self, found: StoredSpeaker) -> tuple[CacheStatus, str | None]:
        """Derive the speaker's status and, of what cannot be ``ready``, the reason.

        Raises: WorkerRPCError, StorageError.
        """
        try:
            self._model.check_clones()
            if found.record.audio_sha256 is None:
                return "ready", None
            need = self._model.need_of(found.record)
            return await self.ensurer.status(need, found.fingerprints)
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

    async def _precompute(self, found: StoredSpeaker, *, force: bool) -> bool:
        self._model.check_clones()
        record, stored = found.record, found.fingerprints
        if record.audio_sha256 is None:
            existed = True
        else:
            need = self._model.need_of(record)
            existed = await self.ensurer.ensure(need, stored=stored, force=force)
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
        existed = await self.ensurer.ensure(need, urgent=False, force=force)
        self._kv_warming.add(record)
        return existed

    def _fetch_fingerprints(self) -> None:
        async def fetch_fingerprints() -> None:
            # By now the serving class, which starts this, knows its family.
            try:
                if self.cloning_workers() is not None:
                    await self.ensurer.fetch_fingerprints()
                    if self.ensurer.knows_fingerprints:
                        await self._warm_last_used()
            finally:
                self._is_fetching = False

        if not self._is_fetching:
            self._is_fetching = True
            self._in_background(fetch_fingerprints())

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
