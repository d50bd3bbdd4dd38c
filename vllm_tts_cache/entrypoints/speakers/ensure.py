"""Ensure: the one way an encoding comes to be, seen from the API process."""

import asyncio
import secrets
import sys
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from cachetools import LRUCache

from vllm_tts_cache.catalogue.records import SpeakerRecord
from vllm_tts_cache.config import Settings
from vllm_tts_cache.entrypoints.speakers.executors import BoundedExecutor
from vllm_tts_cache.entrypoints.speakers.kv_warming import MAX_WAITING, KVWarming
from vllm_tts_cache.entrypoints.speakers.lookups import ReadExecutor, SpeakerLookups
from vllm_tts_cache.entrypoints.speakers.pending import Pending, PendingEncodings
from vllm_tts_cache.entrypoints.speakers.served_model import (
    CannotCloneError,
    ServedModel,
    Status,
)
from vllm_tts_cache.errors import (
    AudioGoneError,
    EncodeError,
    EncodersChangedError,
    GoneError,
    NotStoredError,
    ServerBusyError,
    StorageError,
    TTSCacheError,
    WorkerRPCError,
    WorkerStorageError,
    log_text_of,
)
from vllm_tts_cache.logs import ThrottledLog, logger
from vllm_tts_cache.speaker.reference import EncodingNeed, encoders_id
from vllm_tts_cache.speaker.rpc_client import (
    DESCRIBE,
    ENCODING,
    FAILED,
    AsyncWorkers,
    ForeignStoreError,
    UnsupportedModelError,
    encoding_of,
    fingerprints_of,
    refuse_elsewhere,
)
from vllm_tts_cache.speaker.wire import DescribeCall, EncodingCall, FailedCall
from vllm_tts_cache.store.encoding import Encoding, EncodingKey
from vllm_tts_cache.store.speaker_store import SpeakerStore, StoredSpeaker
from vllm_tts_cache.tenants import ALONE, Tenant

T = TypeVar("T")

throttled = ThrottledLog()

# Tries in all: a voice that is replaced while its prompt is made is looked up again.
MAX_TRIES = 3
# After so long a call that is not urgent answers that encodings are still being made.
IN_TURN_SECONDS = 10.0
# Speakers that one server precomputes at once; the others wait as rows.
MAX_PRECOMPUTED_AT_ONCE = 64
PRECOMPUTE_SECONDS = 5.0
# A failed encode's first next try is as far ahead.
MAX_PAUSE_SECONDS = 60.0
MAX_FORCED = 1024
# Voices that are looked up after a start: not each that spoke last can be prefilled.
MAX_LOOKED_AT = 4 * MAX_WAITING
# Audios whose fetched encodings are remembered; the worker is asked again for others.
MAX_FETCHED = 100_000
# In timeouts of one encode: a request that others are always encoded before has to fail
# while its client still waits for the answer.
MAX_TIMEOUTS_IN_LINE = 5
MAX_READS = 1024


class SpeakerEncodings:
    """The encodings of one server's speakers; for the event loop only.

    Args:
        settings: How long, and how many may wait. A request waits for five times the
            timeout of an encode in all.

    Attributes:
        encoders_id: The workers' encoders, as `fingerprints` knew them last.
        secret: Signs speakers and salts; the workers have it when they are described.
    """

    def __init__(
        self,
        store: SpeakerStore,
        settings: Settings,
        workers: AsyncWorkers,
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
        self.pending = PendingEncodings(workers, store, lookups, settings)
        self._reads = BoundedExecutor(
            "too many encodings are read", num_threads=4, max_waiting=MAX_READS
        )
        self._notes = BoundedExecutor(
            "too many failures are noted", num_threads=1, max_waiting=MAX_READS
        )
        self._fingerprints: dict[str, str] | None = None
        self.encoders_id = ""
        self.secret = secrets.token_bytes(32)  # until that of the catalogue is read
        self._has_logged_foreign_store = False
        self._fetching: asyncio.Task[Any] | None = None
        self._to_recheck = set[str]()
        # Of an object store's: audio -> encoders whose encoding the worker has fetched.
        self._fetched = LRUCache[str, set[str]](MAX_FETCHED)
        self._background: set[asyncio.Task[Any]] = set()
        self._forced: dict[EncodingNeed, asyncio.Task[bool | TTSCacheError]] = {}
        # Speakers before this generation were handed to the worker, for these encoders.
        self._next_generation, self._precomputed_for = sys.maxsize, list[str]()
        self._underway = set[tuple[int, bool]]()
        self._slots = asyncio.Semaphore(MAX_PRECOMPUTED_AT_ONCE)
        self._has_registered = asyncio.Event()
        self._precomputing: asyncio.Task[None] | None = None

    def cloning_workers(self) -> AsyncWorkers | None:
        """Return the workers; None if the model clones nothing."""
        return None if self._model.family() is None else self._workers

    def start(self) -> None:
        """Ask the workers for their encoders, and precompute; needs a running loop."""
        self._fetch_fingerprints()
        self._precomputing = asyncio.create_task(self._precompute_registered())

    def shutdown(self) -> None:
        """Stop tasks and threads; callers that wait get a ServerBusyError."""
        for task in filter(None, (self._precomputing, *self._background)):
            task.cancel()
        self._precomputing = None
        for each in (self.pending, self._reads, self._notes):
            each.shutdown()

    # -------- the workers' encoders

    async def fingerprints(self) -> dict[str, str]:
        """Return encoder name -> fingerprint; asks the workers unless it is known.

        Raises: WorkerRPCError if they do not answer, disagree, or read another store.
        """
        return self._fingerprints or await self._describe()

    @property
    def knows_encoders(self) -> bool:
        """Whether the fingerprints are known, or not needed as the model clones none.

        If not, a background task asks the workers.
        """
        if self.cloning_workers() is None or self._fingerprints is not None:
            return True
        self._fetch_fingerprints()
        return False

    async def keys(self, need: EncodingNeed) -> list[EncodingKey]:
        """Return the keys of the encodings. Raises: as `fingerprints`."""
        fingerprints = self._fingerprints or await self._describe()
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

        A caller that is cancelled withdraws what no other caller waits for.

        Args:
            need: Which encodings.
            tenant: In whose turn they are made.
            stored: Fingerprints of the audio's encodings that are stored, if the
                caller has looked that up; None to look it up.
            urgent: Whether a request waits.
            force: Encode anew what exists; requests use the old encoding until then.

        Raises:
            AudioGoneError: The audio is not stored (any more).
            EncodersChangedError: The workers have other encoders by now.
            NotStoredError: Not urgent, and an encoding could not be stored.
            WorkerStorageError: A worker's bucket or catalogue does not answer.
            EncodeError: An encoder failed; the next call tries again.
            EncodeTimeoutError: An encode took too long; it may still run.
            ServerBusyError: Too many inline references wait, or a request has waited
                for too long although others are encoded.
            WorkerRPCError: The workers could not be asked.
        """
        sha, look = need.ref.audio_sha256, self._store.stored_artifacts
        if sha in self._to_recheck:  # by a worker without the secret, perhaps
            await self._describe()
        keys = await self.keys(need)
        missing = absent = keys
        if not force and sha not in self._to_recheck:
            if stored is None:
                stored = (await self._lookups.run(look, [sha]))[sha]
            missing = [k for k in keys if k.encoder_fingerprint not in stored]
            if self._store.copies is not None:
                stored = stored & self._fetched.get(sha, frozenset())
            absent = [k for k in keys if k.encoder_fingerprint not in stored]
        if not absent:
            return True
        await self._wait(absent, need, tenant, urgent=urgent, force=force)
        if not urgent:  # a file may be there without its row
            stored = (await self._lookups.run(look, [sha]))[sha]
            if any(key.encoder_fingerprint not in stored for key in keys):
                raise NotStoredError
        self._to_recheck.discard(sha)
        if self._store.copies is not None:
            artifacts = {key.encoder_fingerprint for key in absent}
            self._fetched.setdefault(sha, set()).update(artifacts)
        return not missing

    def recheck(self, audio_sha256: str) -> None:
        """Have the next `ensure` ask the worker: a prompt of this audio was missing."""
        self._to_recheck.add(audio_sha256)

    async def encoding(self, key: EncodingKey) -> Encoding:
        """Return an encoding that `ensure` has made sure of.

        Raises: GoneError if it is gone again, or the worker's copy is damaged;
            ServerBusyError if too many are read; WorkerRPCError.
        """
        try:
            if (found := await self._reads.run(self._store.read, key)) is not None:
                return found
        except StorageError as exc:
            throttled.warn_of("reading an encoding", "%s", exc.log_text)
        # Where the disk cannot store or read it, the worker may have it in memory.
        call = EncodingCall(key.audio_sha256, key.encoder_fingerprint)
        answers = await self._workers.call(ENCODING, call)
        try:
            return encoding_of(answers, key)
        except EncodeError as exc:
            if await self._lookups.run(self._store.has_audio, key.audio_sha256):
                self.recheck(key.audio_sha256)
            raise GoneError(str(exc)) from exc

    async def cause_of_failure(self, request_id: str) -> str | None:
        """Return why a request's prompt was missing; None if it was not, or unknown."""
        try:
            answers = await self._workers.call(FAILED, FailedCall([request_id]))
        except WorkerRPCError as exc:
            message = "Asking workers why a prompt was missing failed: %s"
            throttled.warn_of("asking for causes", message, exc)
            return None
        causes = (answer.causes.get(request_id) for answer in answers)
        return next(filter(None, causes), None)

    def delete(self, audio_sha256: str) -> None:
        """Delete what is remembered of an audio: fetched encodings and its recheck."""
        self._to_recheck.discard(audio_sha256)
        self._fetched.pop(audio_sha256, None)

    def delete_all(self) -> None:
        """Delete the same of all audios."""
        self._to_recheck.clear()
        self._fetched.clear()

    # -------- those of registered speakers

    async def precompute(
        self, found: StoredSpeaker, *, force: bool = False, urgent: bool = True
    ) -> bool | None:
        """Make the speaker's encodings exist; True if they already did.

        Unless ``urgent``, they are made in the background, as after a registration, and
        waited for a while; None if they are still being made then.

        Raises: SpeakerNotFoundError if it is deleted meanwhile, SpeakerReplacedError
            if it is replaced again and again, CannotCloneError, and as `ensure`.
        """
        tenant, name = Tenant(name=found.record.tenant), found.record.name
        make = self._precompute if urgent else self._precompute_in_turn
        self._model.check_clones()
        num_left = MAX_TRIES
        while True:
            was, num_left = found.record, num_left - 1
            try:
                return await make(was, found.fingerprints, force=force)
            except GoneError:
                if not num_left:
                    check = self._speakers.check_stays
                    await check(tenant, name, was.audio_sha256, was.generation)
                    raise
                found = await self._speakers.get(tenant, name)

    def precompute_from(self, generation: int) -> None:
        """Precompute soon what is registered from this generation on."""
        self._next_generation = min(self._next_generation, generation)
        self._has_registered.set()

    def warm(self, record: SpeakerRecord) -> None:
        """Queue a speaker for prefilling if its encodings exist already."""
        if self._kv_warming.is_possible:
            tenant = Tenant(name=record.tenant)
            self._in_background(self._warm_if_ready(tenant, record.name))

    async def status(self, found: StoredSpeaker) -> Status:
        """Derive the speaker's status. Raises: WorkerRPCError, StorageError."""
        try:
            self._model.check_clones()
            if found.record.audio_sha256 is None:
                return Status("ready")
            need = self._model.need_of(found.record)
            return await self.status_of(need, found.fingerprints)
        except CannotCloneError as exc:
            return Status("unsupported", str(exc))
        except UnsupportedModelError:
            return Status("unsupported", self._model.reason)

    async def status_of(self, need: EncodingNeed, stored: frozenset[str]) -> Status:
        """Derive the status; ``stored`` are the fingerprints of stored encodings."""
        keys = await self.keys(need)
        missing = [key for key in keys if key.encoder_fingerprint not in stored]
        if not missing:
            return Status("ready")
        if any(key in self.pending for key in missing):
            return Status("processing")
        sha = need.ref.audio_sha256
        failures = await self._lookups.run(self._store.failures, sha)
        for key in missing:
            if (failure := failures.get(key.encoder_fingerprint)) is not None:
                return Status("failed", *failure)
        if not await self._lookups.run(self._store.has_audio, sha):
            return Status("failed", "its reference audio is not stored")
        return Status("pending")

    # -------- how

    async def _describe(self) -> dict[str, str]:
        try:
            self.secret = await self._reads.run(self._store.database.secret)
        except StorageError:
            if self._fingerprints is None:  # else the one that was read last serves
                raise
        answers = await self._workers.call(DESCRIBE, DescribeCall(self.secret))
        refuse_elsewhere(answers, self._store.store_id)
        self._fingerprints = fingerprints_of(answers)
        self.encoders_id = encoders_id(self._fingerprints)
        return self._fingerprints

    async def _wait(
        self,
        keys: Sequence[EncodingKey],
        need: EncodingNeed,
        tenant: str,
        *,
        urgent: bool,
        force: bool,
    ) -> None:
        sha, segment = need.ref.audio_sha256, need.ref.segment
        # The worker has to fetch what the bucket has.
        only_worker = self._store.copies is not None or sha in self._to_recheck
        max_seconds = self._max_wait_seconds if urgent else None
        pending: list[Pending] = []
        try:
            for key in keys:
                joined = self.pending.join(
                    key,
                    segment,
                    tenant=tenant,
                    # Any client may force an encode of any of its voices.
                    urgent=urgent and not force,
                    force=force,
                    only_worker=only_worker,
                )
                pending.append(joined)
            futures = [each.future for each in pending]
            # `wait` cancels no future: other callers wait for it too.
            first = asyncio.FIRST_EXCEPTION
            waiting = asyncio.wait(futures, timeout=max_seconds, return_when=first)
            _, late = await waiting
            for future in futures:
                if future.done():
                    future.result()
            if late:
                what = f"others were encoded for {max_seconds:g} s before this audio"
                raise ServerBusyError(what)
        except EncodersChangedError:
            self._fingerprints = None
            raise
        finally:
            for each in pending:
                if not each.future.done():
                    self.pending.leave(each)

    async def _precompute(
        self,
        record: SpeakerRecord,
        stored: frozenset[str] | None = None,
        *,
        urgent: bool = True,
        force: bool = False,
    ) -> bool:
        existed = True
        if record.audio_sha256 is not None:
            need, tenant = self._model.need_of(record), record.tenant
            existed = await self.ensure(
                need, tenant=tenant, stored=stored, urgent=urgent, force=force
            )
        self._kv_warming.add(record)
        return existed

    async def _precompute_in_turn(
        self, record: SpeakerRecord, stored: frozenset[str], *, force: bool
    ) -> bool | None:
        if record.audio_sha256 is None:
            return await self._precompute(record)
        need = self._model.need_of(record)
        if not force:  # the row has it encoded after the answer, too
            change = self._store.set_precompute
            await self._speakers.reads.run(change, record.generation)
            self.precompute_from(record.generation)
            making = self._in_background(self._precompute(record, stored, urgent=False))
        elif (making := self._forced.get(need)) is None:
            if len(self._forced) >= MAX_FORCED:
                raise ServerBusyError("too many encodings are made anew")
            work = self._precompute(record, urgent=False, force=True)
            making = self._forced[need] = self._in_background(work)
            making.add_done_callback(lambda _: self._forced.pop(need))
        try:
            await asyncio.wait([making], timeout=IN_TURN_SECONDS)
        finally:
            if not force:  # `_precompute_registered` has it encoded, too
                making.cancel()
        if not making.done():
            return None
        if isinstance(made := making.result(), TTSCacheError):
            raise made
        return made

    async def _precompute_registered(self) -> None:
        """Precompute what is registered and not encoded, until it is cancelled.

        It reads what is to be done from the catalogue, a few speakers at a time: so a
        restart, an outage or a failed call leaves nothing out. A failed encode is left
        out until its row says that another try is worth while.
        """
        while True:
            try:
                if self.cloning_workers() is not None:
                    await self._precompute_all()
            except Exception as exc:  # noqa: BLE001  if it ended no voice would be ready
                message = "Precomputing failed, and is tried again: %s"
                throttled.warn_of("precomputing", message, log_text_of(exc))
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._has_registered.wait(), PRECOMPUTE_SECONDS)
            self._has_registered.clear()

    async def _precompute_all(self) -> None:
        """Hand the worker every speaker that lacks encodings.

        Raises: As `fingerprints`, StorageError.
        """
        fingerprints = sorted((await self.fingerprints()).values())
        read, store = self._speakers.reads.run, self._store
        if fingerprints != self._precomputed_for:
            self.precompute_from(await read(store.first_to_precompute))
            self._precomputed_for = fingerprints
        most = MAX_PRECOMPUTED_AT_ONCE
        for record in await read(store.to_retry, fingerprints, most):
            await self._precompute_soon(record)
        last, after = await read(store.last_generation), self._next_generation - 1
        # The next pass finds what `precompute_from` sets meanwhile.
        self._next_generation = last + 1
        try:
            while records := await read(store.unencoded, fingerprints, after, most):
                for record in records:
                    after = record.generation
                    await self._precompute_soon(record)
            after = max(after, last)
        finally:
            self._next_generation = min(self._next_generation, after + 1)

    async def _precompute_soon(self, record: SpeakerRecord) -> None:
        """Begin to precompute a speaker as soon as a slot is free."""
        # A transcript that came or went changes which encodings it needs.
        if (this := (record.generation, not record.ref_text)) in self._underway:
            return
        await self._slots.acquire()
        self._underway.add(this)
        making = self._in_background(self._precompute_until_done(record))
        making.add_done_callback(lambda _: self._underway.discard(this))
        making.add_done_callback(lambda _: self._slots.release())

    async def _precompute_until_done(self, record: SpeakerRecord) -> None:
        """Precompute a speaker; try again after an outage, or if a worker is busy."""
        pause_seconds = PRECOMPUTE_SECONDS
        while True:
            try:
                await self._precompute(record, urgent=False)
                return
            except CannotCloneError:
                return  # registered for another model
            except TTSCacheError as exc:
                if isinstance(exc, EncodeError | WorkerStorageError):
                    if await self._is_left_to_rows(record, exc, pause_seconds):
                        return
                    pause_seconds = min(2 * pause_seconds, MAX_PAUSE_SECONDS)
                message = "Precomputing a speaker is tried again: %s"
                throttled.warn_of("precomputing", message, exc.log_text)
                await asyncio.sleep(pause_seconds)

    async def _is_left_to_rows(
        self, record: SpeakerRecord, failed: TTSCacheError, seconds: float
    ) -> bool:
        """Whether the audio is deleted, or a row says when to encode it again.

        Where no worker wrote that row, this process does after some tries; at once if
        the file is lost.
        """
        with suppress(TTSCacheError):
            keys = await self.keys(self._model.need_of(record))
            sha, look = keys[0].audio_sha256, self._lookups.run
            if not await look(self._store.has_audio, sha):
                return True
            noted = await look(self._store.failures, sha)
            due = [key for key in keys if key.encoder_fingerprint in noted]
            is_lost = isinstance(failed, AudioGoneError)
            is_lost = is_lost and await look(self._store.is_lost, record)
            if due or is_lost or seconds >= MAX_PAUSE_SECONDS:
                for key in due or keys:
                    await self._notes.run(self._store.note_failed, key, str(failed))
                return True
        return False

    def _fetch_fingerprints(self) -> None:
        def end(_: object) -> None:
            self._fetching = None  # asyncio logs a failure once nobody holds the task

        if self._fetching is None:
            self._fetching = self._in_background(self._fetch_and_warm())
            self._fetching.add_done_callback(end)

    async def _fetch_and_warm(self) -> None:
        """Ask before a request needs it; log it if the workers read another store."""
        try:
            # By now the serving class, which starts this, knows its family.
            if self.cloning_workers() is not None:
                await self.fingerprints()
                if self._kv_warming.is_possible:
                    await self._warm_last_used()
        except ForeignStoreError as exc:
            if not self._has_logged_foreign_store:
                logger.error("%s", exc)
            self._has_logged_foreign_store = True
        except (WorkerRPCError, StorageError) as exc:  # it may not be served yet
            logger.debug("Asking for fingerprints failed: %s", exc)

    async def _warm_last_used(self) -> None:
        """Queue the speakers for prefilling that spoke before the engine started."""
        last_used, num_left = self._store.last_used, MAX_WAITING
        for tenant, name in await self._speakers.reads.run(last_used, MAX_LOOKED_AT):
            num_left -= await self._warm_if_ready(Tenant(name=tenant), name)
            if not num_left:
                return

    async def _warm_if_ready(self, tenant: Tenant, name: str) -> bool:
        found = await self._speakers.find(tenant, name)
        if found is None or (await self.status(found)).state != "ready":
            return False
        return self._kv_warming.add(found.record)

    def _in_background(
        self, work: Coroutine[Any, Any, T]
    ) -> "asyncio.Task[T | TTSCacheError]":
        async def run() -> T | TTSCacheError:
            try:
                return await work
            except TTSCacheError as exc:  # the next request gets its own error
                throttled.warn_of("precomputing", "In the background: %s", exc.log_text)
                return exc

        task = asyncio.create_task(run())
        self._background.add(task)  # the loop itself keeps only a weak reference
        task.add_done_callback(self._background.discard)
        # A task that is cancelled before it began would leave ``work`` unawaited.
        task.add_done_callback(lambda _task: work.close())
        return task
