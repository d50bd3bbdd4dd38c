"""Encodings that callers of one process wait for; asks the workers for them."""

import asyncio
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice
from operator import attrgetter

from msgspec import structs

from vllm_tts_cache.audio.reference import AUDIO, Segment
from vllm_tts_cache.catalogue import stored_files
from vllm_tts_cache.config import Settings
from vllm_tts_cache.entrypoints.speakers.lookups import ReadExecutor
from vllm_tts_cache.errors import (
    AudioGoneError,
    EncodeError,
    EncodersChangedError,
    EncodeTimeoutError,
    ServerBusyError,
    TTSCacheError,
    WorkerStorageError,
)
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.speaker.rpc_client import (
    WANT,
    AsyncWorkers,
    UnsupportedModelError,
    WorkerBusyError,
)
from vllm_tts_cache.speaker.wire import JobState, Want, WantAnswer, WantCall, WantReport
from vllm_tts_cache.store.encoding import EncodingKey
from vllm_tts_cache.store.speaker_store import SpeakerStore

throttled = ThrottledLog()

# A call to a worker interrupts its decoding for half a millisecond; a query of the
# catalogue interrupts none. So workers are asked only for what it does not have: what
# failed, or fits on no disk. While encodings arrive, calls only renew the lease.
LEASE_SECONDS = 2.0
LOOK_SECONDS = 0.02
ASK_SECONDS = 0.25
RENEW_SECONDS = LEASE_SECONDS / 2
# New wants are sent at once, but no more often than this, and no more in one call: for
# each the worker looks whether its file exists.
MIN_ASK_SECONDS = 0.125
MAX_NEW = 64
MAX_WITHDRAWN = 1024
_KEYS_PER_LOOK = 1000
# A shorter outage of the catalogue or of a worker fails no caller.
OUTAGE_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class Pending:
    """One encoding that callers of this process wait for.

    Attributes:
        future: Done when the encoding exists, or with the error that prevents it.
        since: When its deadline began to run, in monotonic seconds.
        only_worker: Whether only a worker's report ends it: the catalogue may be wrong.
        was_sent: Whether the workers may have received the want.
    """

    key: EncodingKey
    want: Want
    future: "asyncio.Future[None]"
    since: float
    only_worker: bool = False
    num_waiting: int = 0
    was_sent: bool = False


class PendingEncodings:
    """One future for each key, for all callers of a process; for the event loop only.

    While a caller waits, one task asks the catalogue often and the workers seldom. It
    sends new wants, and withdraws those that no caller waits for any more. The workers
    decide which encoding is made first.

    Args:
        settings: The longest encode, and time without any progress of the worker, that
            a caller waits for; and how many inline audios may wait at once.
    """

    def __init__(
        self,
        workers: AsyncWorkers,
        store: SpeakerStore,
        lookups: ReadExecutor,
        settings: Settings,
    ):
        self._workers = workers
        self._store = store
        self._lookups = lookups
        self._timeout_seconds = settings.encode_timeout_seconds
        self._max_inline = settings.max_waiting_inline
        self._client_id = uuid.uuid4().hex
        self._ids = count()
        self._by_key: dict[EncodingKey, Pending] = {}
        self._by_id: dict[int, Pending] = {}
        self._unsent: dict[int, Pending] = {}
        self._withdrawn: dict[int, None] = {}
        self._joined: asyncio.Future[None] | None = None  # done when one has joined
        self._task: asyncio.Task[None] | None = None
        self._is_shut_down = False
        self._last_id = 0  # of the rows that were looked at
        self._asked_at = 0.0  # when the last answer came
        self._answer_seconds = 0.0  # how long it took
        self._num_stored_since = 0  # encodings, since the workers were asked last
        self._num_replicas = 0  # that answered when asked last
        self._num_finished = -1
        self._progress_at = 0.0
        self._encoding: list[Pending] = []  # by encode threads, when asked last
        self._outage_since: float | None = None

    def __len__(self) -> int:
        """Return the number of encodings that callers wait for."""
        return len(self._by_key)

    def __contains__(self, key: EncodingKey) -> bool:
        """Whether a caller waits for this encoding."""
        return key in self._by_key

    def refuses(self, audio_sha256: str) -> bool:
        """Whether this inline audio would be one too many that waits."""
        wants = [pending.want for pending in list(self._by_key.values())]  # in threads
        inline = (w.audio_sha256 for w in wants if w.segment == Segment.INLINE)
        return len({audio_sha256, *inline}) > self._max_inline

    def join(
        self,
        key: EncodingKey,
        segment: Segment,
        *,
        tenant: str,
        urgent: bool,
        force: bool = False,
        only_worker: bool = False,
    ) -> Pending:
        """Add a caller, who waits for the ``future`` and then calls `leave`.

        The arguments are fields of `Want` and `Pending`.

        Raises: ServerBusyError if too many inline audios wait, or after a shutdown.
        """
        if self._is_shut_down:
            raise ServerBusyError("it is shutting down")
        want = Want(
            id=next(self._ids),
            audio_sha256=key.audio_sha256,
            fingerprint=key.encoder_fingerprint,
            segment=segment.value,
            tenant=tenant,
            urgent=urgent,
            force=force,
        )
        if (pending := self._by_key.get(key)) is None:
            if segment is Segment.INLINE and self.refuses(key.audio_sha256):
                raise too_many_inline()
            future = asyncio.get_running_loop().create_future()
            pending = Pending(key, want, future, time.monotonic())
            self._by_key[key] = self._by_id[want.id] = self._unsent[want.id] = pending
        else:
            self._merge(pending, want)
        pending.only_worker |= only_worker
        pending.num_waiting += 1
        if self._joined is not None and not self._joined.done():
            self._joined.set_result(None)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return pending

    def leave(self, pending: Pending) -> None:
        """Remove a caller that waits no longer; the last one withdraws the want."""
        pending.num_waiting -= 1
        if not pending.num_waiting:
            self._settle(pending)

    def end(self, audio_sha256: str) -> None:
        """Fail the callers that wait for encodings of an audio that is gone."""
        for pending in list(self._by_key.values()):
            if pending.key.audio_sha256 == audio_sha256:
                self._settle(pending, AudioGoneError())

    def shutdown(self) -> None:
        """Stop asking; waiting and later callers get a ServerBusyError."""
        self._is_shut_down = True
        self._settle_all(ServerBusyError("it is shutting down"))
        if self._task is not None:
            self._task.cancel()

    # -------- what is waited for

    def _merge(self, pending: Pending, new: Want) -> None:
        """Change the want to what one more caller needs."""
        was = pending.want
        now_forced = new.force and not was.force
        want = structs.replace(
            new,  # also its tenant: the worker keeps the tenants of before
            # A running encode may have begun before this caller forced one.
            id=new.id if now_forced else was.id,
            segment=was.segment if new.segment == Segment.INLINE else new.segment,
            urgent=new.urgent or was.urgent,
            force=new.force or was.force,
        )
        if now_forced:
            self._withdraw(pending)
        if want != was:
            pending.want = want
            self._by_id[want.id] = self._unsent[want.id] = pending

    def _withdraw(self, pending: Pending) -> None:
        """Withdraw the want, if the workers may have received it."""
        number = pending.want.id
        del self._by_id[number]
        self._unsent.pop(number, None)
        if pending.was_sent:
            self._withdrawn[number] = None
        pending.was_sent = False

    def _settle(self, pending: Pending, error: TTSCacheError | None = None) -> None:
        """Finish the future, once; the encoding exists unless there is an error."""
        if pending.future.done():  # the key may have a new `Pending` by now
            return
        del self._by_key[pending.key]
        self._withdraw(pending)
        if error is None:
            pending.future.set_result(None)
        else:
            pending.future.set_exception(error)
            pending.future.exception()  # the callers may all have left

    def _settle_all(self, error: TTSCacheError) -> None:
        for pending in list(self._by_key.values()):
            self._settle(pending, error)

    # -------- the task

    async def _run(self) -> None:
        try:
            while self._by_key:
                self._joined = asyncio.get_running_loop().create_future()
                # Where no request waits, longer pauses save CPU.
                is_urgent = any(each.want.urgent for each in self._by_key.values())
                pause_seconds = LOOK_SECONDS if is_urgent else ASK_SECONDS
                try:
                    await self._ask_and_look()
                except TTSCacheError as exc:
                    self._fail_after_outage(exc)
                    pause_seconds = MIN_ASK_SECONDS
                if self._by_key:
                    await asyncio.wait([self._joined], timeout=pause_seconds)
        except Exception as exc:  # noqa: BLE001  it must not leave callers waiting
            message = "Waiting for encodings failed: %r"
            throttled.warn_of("waiting", message, exc, mistake=exc)
            self._settle_all(EncodeError(f"waiting for it failed: {exc!r}"))
        finally:
            # If a call of the host's was cancelled in it, the callers still wait.
            self._task = asyncio.create_task(self._run()) if self._by_key else None

    def _fail_after_outage(self, error: TTSCacheError) -> None:
        """Fail callers that have waited for `OUTAGE_SECONDS` of an outage."""
        now = time.monotonic()
        if self._outage_since is None:
            self._outage_since = now
        is_final = self._workers.have_ended or isinstance(error, UnsupportedModelError)
        for pending in list(self._by_key.values()):
            waited_seconds = now - max(pending.since, self._outage_since)
            if is_final or waited_seconds >= OUTAGE_SECONDS:
                self._settle(pending, error)

    # -------- the catalogue

    async def _look(self) -> None:
        """Finish the futures of encodings that were stored since the last call.

        The workers report what was stored before they were asked.

        Raises: StorageError.
        """
        look, last_id = self._stored_since, self._last_id
        self._last_id = 0  # if it fails: a failover may have lost the newest rows
        if self._lookups.is_local:
            self._last_id, keys = look(last_id)
        else:
            self._last_id, keys = await self._lookups.run(look, last_id)
        self._num_stored_since += len(keys)
        for pending in filter(None, map(self._by_key.get, keys)):
            # A forced encoding is stored already; the worker reports the new one.
            if not pending.want.force and not pending.only_worker:
                self._settle(pending)

    def _stored_since(self, file_id: int) -> tuple[int, list[EncodingKey]]:
        """Return the number for the next call, and encodings stored after ``file_id``.

        The newest come first; those before the newest thousand files are left out.
        """
        with self._store.database.read() as db:
            rows = stored_files.since(db, file_id, _KEYS_PER_LOOK)
        keys = [
            EncodingKey(audio_sha256=sha, encoder_fingerprint=artifact)
            for _, sha, artifact in rows
            if artifact != AUDIO
        ]
        return rows[0][0] if rows else file_id, keys

    # -------- the workers

    async def _ask_and_look(self) -> None:
        """Ask the workers if it is time, and look into the catalogue until they answer.

        A diffusion model's worker answers between two batches; requests of the next one
        can use what was encoded meanwhile.

        Raises: WorkerRPCError, StorageError.
        """
        # While the host waits for an answer it hands on no request.
        wait_seconds = max(MIN_ASK_SECONDS, self._answer_seconds)
        if not self._unsent:
            rest_seconds = RENEW_SECONDS if self._num_stored_since else ASK_SECONDS
            wait_seconds = max(wait_seconds, rest_seconds)
        if time.monotonic() - self._asked_at < wait_seconds:
            await self._look()
            return
        # Until an answer comes, no replica counts as one that knows our wants.
        num_replicas, self._num_replicas = self._num_replicas, 0
        batch, call = self._next_call()
        began_at = time.monotonic()
        asking = asyncio.ensure_future(self._workers.call(WANT, call))
        try:
            while not (await asyncio.wait([asking], timeout=LOOK_SECONDS))[0]:
                await self._look()
        finally:
            # The end, and not the start: the host's other calls wait behind this one.
            self._asked_at = time.monotonic()
            self._answer_seconds = self._asked_at - began_at
            # The next call needs its end, and asyncio would log its error.
            if not asking.done():
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            elif not asking.cancelled():
                asking.exception()
        try:
            self._read_answers(batch, call, asking.result(), num_replicas)
        except WorkerBusyError:
            self._expire(self._num_finished)  # callers have timeouts of their own
        finally:
            await self._look()  # also where no worker can be asked
        self._outage_since = None

    def _next_call(self) -> tuple[list[Pending], WantCall]:
        """Return what the workers are told next, and whose wants are new in it.

        Wants are sent again if no answer comes: they may not have arrived.
        """
        is_urgent = attrgetter("want.urgent")  # those are sent first
        batch = sorted(self._unsent.values(), key=is_urgent, reverse=True)[:MAX_NEW]
        withdrawn = list(islice(self._withdrawn, MAX_WITHDRAWN))
        # The next answer may take as long, and the lease is to last until then.
        lease_seconds = LEASE_SECONDS + 3 * self._answer_seconds
        for pending in batch:
            pending.was_sent = True
        self._num_stored_since = 0
        new = [pending.want for pending in batch]
        return batch, WantCall(self._client_id, new, withdrawn, lease_seconds)

    def _read_answers(
        self,
        batch: Sequence[Pending],
        call: WantCall,
        answers: Sequence[WantAnswer],
        num_replicas: int,
    ) -> None:
        """Read which wants have ended; ``num_replicas`` answered the call before."""
        answers = [answer for answer in answers if answer.rank == 0]
        for number in call.withdrawn:
            self._withdrawn.pop(number)
        self._num_replicas = len(answers)
        if num_replicas != len(answers) or not all(a.knew_client for a in answers):
            # The lease ran out, a worker is new, or an answer was lost that said so.
            self._unsent |= self._by_id
        for pending, want in zip(batch, call.new, strict=True):
            if pending.want == want:
                self._unsent.pop(want.id, None)
        self._encoding = []
        reports = defaultdict[int, list[WantReport]](list)
        for answer in answers:
            for report in answer.reports:
                reports[report.id].append(report)
        for number, of_replicas in reports.items():
            if (pending := self._by_id.get(number)) is not None:
                self._read_reports(pending, of_replicas, len(answers))
            else:
                self._withdrawn[number] = None
        self._expire(sum(answer.num_finished for answer in answers))

    def _read_reports(
        self, pending: Pending, reports: Sequence[WantReport], num_replicas: int
    ) -> None:
        by_state = {report.state: report for report in reports}
        if (failed := by_state.get(JobState.FAILED)) is not None:
            reason = f"The reference audio was not encoded: {failed.reason}"
            self._settle(pending, EncodeError(reason))
        elif (away := by_state.get(JobState.AWAY)) is not None:
            self._settle(pending, WorkerStorageError(away.reason))
        elif JobState.NO_AUDIO in by_state:
            self._settle(pending, AudioGoneError())
        elif JobState.NO_ENCODER in by_state:
            self._settle(pending, EncodersChangedError())
        elif JobState.REFUSED in by_state:
            self._settle(pending, too_many_inline())
        elif by_state.keys() == {JobState.READY} and len(reports) == num_replicas:
            self._settle(pending)
        elif (encoding := by_state.get(JobState.ENCODING)) is not None:
            pending.since = time.monotonic() - encoding.encoding_seconds
            self._encoding.append(pending)

    def _expire(self, num_finished: int) -> None:
        if num_finished != self._num_finished:
            self._num_finished = num_finished
            self._progress_at = time.monotonic()
        limit = time.monotonic() - self._timeout_seconds
        # While jobs end in the workers, waiting wants are not stuck, only not first.
        is_stuck = self._progress_at < limit
        late = list(self._by_key.values()) if is_stuck else self._encoding
        for pending in late:
            if pending.since < limit:
                error = EncodeTimeoutError(
                    "The reference audio was not encoded within "
                    f"{self._timeout_seconds:g} s; it may still be under way. Try "
                    "again, or raise SPEAKER_CACHE_ENCODE_TIMEOUT_SECONDS."
                )
                self._settle(pending, error)


def too_many_inline() -> ServerBusyError:
    """Return the error of an inline encoding that is refused, here or by a worker."""
    return ServerBusyError("too many inline references wait to be encoded")
