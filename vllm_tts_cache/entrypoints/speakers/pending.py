"""What callers of one process wait for; the one place that asks the workers of it."""

import asyncio
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count, islice

from msgspec import structs

from vllm_tts_cache.catalogue.records import Segment
from vllm_tts_cache.entrypoints.speakers.executors import RETRY_AFTER_SECONDS
from vllm_tts_cache.entrypoints.speakers.lookups import ReadExecutor
from vllm_tts_cache.errors import (
    AudioGoneError,
    EncodeError,
    EncodersChangedError,
    EncodeTimeoutError,
    ServerBusyError,
    TTSCacheError,
)
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.speaker.rpc_client import (
    WANT,
    AsyncWorkers,
    UnsupportedModelError,
    WorkerBusyError,
)
from vllm_tts_cache.speaker.wire import (
    JobState,
    Want,
    WantAnswer,
    WantCall,
    WantReport,
)
from vllm_tts_cache.store.encoding import EncodingKey
from vllm_tts_cache.store.speaker_store import SpeakerStore

throttled = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))

# Asking a worker takes it off decoding for half a millisecond; asking the catalogue
# costs nobody anything. So the worker is asked for what the catalogue cannot tell: a
# failure, or a full disk. While encodings arrive, only the lease is renewed.
LEASE_SECONDS = 2.0
LOOK_SECONDS = 0.02
ASK_SECONDS = 0.25
RENEW_SECONDS = LEASE_SECONDS / 2
# What is new is sent at once, but no more often than this, and no more at a time: for
# each the worker looks whether there is a file.
MIN_ASK_SECONDS = 0.125
MAX_NEW = 64
MAX_WITHDRAWN = 1024
# A catalogue or a worker that is out of reach for less fails nobody.
OUTAGE_SECONDS = 5.0
_NO_NUMBER = -1  # what the catalogue answers with the number to begin from


@dataclass(slots=True, kw_only=True, eq=False)
class Pending:
    """One encoding that callers of this process wait for.

    Attributes:
        want: As the workers are to know it.
        landed: Done when the encoding exists, or cannot be had.
        since: When its deadline began to run, in monotonic seconds.
        only_worker: Whether only a worker's word counts: the catalogue may be wrong.
        was_sent: Whether the workers may know of the want.
    """

    key: EncodingKey
    want: Want
    landed: "asyncio.Future[None]"
    since: float
    only_worker: bool
    num_waiting: int = 0
    was_sent: bool = False


class PendingEncodings:
    """A future a key, for all callers of a process; for the event loop only.

    One task asks the catalogue often and the workers seldom, while somebody waits. It
    tells the workers what is new and what nobody waits for any more. Which encoding is
    made first is theirs to decide.

    Args:
        timeout_seconds: Longest encode, and longest time without any progress of the
            worker, that a caller waits for.
        max_waiting_inline: Inline encodings at once; one more is refused.
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
        self._timeout_seconds = timeout_seconds
        self._max_inline = max_waiting_inline
        self._client_id = uuid.uuid4().hex
        self._ids = count()
        self._by_key: dict[EncodingKey, Pending] = {}
        self._by_id: dict[int, Pending] = {}
        self._num_inline = 0
        # Those that requests wait for are told of first.
        self._untold: dict[bool, dict[int, Pending]] = {True: {}, False: {}}
        self._unseen: list[Pending] = []  # that the catalogue was not asked for yet
        self._withdrawn: dict[int, None] = {}
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_shut_down = False
        self._last_id = _NO_NUMBER
        self._asked_at = 0.0  # when the last answer came
        self._answer_seconds = 0.0  # how long it took
        self._num_stored_since = 0  # since the workers were asked
        self._num_replicas = 0  # that answered when asked last
        self._num_finished = -1
        self._progress_at = 0.0
        self._in_hand: list[Pending] = []  # of the encode threads, when asked last
        self._outage_since: float | None = None

    def __len__(self) -> int:
        """Encodings that are waited for."""
        return len(self._by_key)

    def __contains__(self, key: EncodingKey) -> bool:
        """Tell whether anybody waits for this encoding."""
        return key in self._by_key

    @property
    def is_full(self) -> bool:
        """Whether one more inline encoding would be refused."""
        return self._num_inline >= self._max_inline

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
        """Want an encoding; the caller waits for ``landed`` and then leaves.

        Args:
            key: Which encoding.
            segment: Whose it is.
            tenant: In whose turn it is made.
            urgent: Whether a request waits.
            force: Encode although it exists.
            only_worker: Whether the worker is to look although the catalogue has it.

        Raises: ServerBusyError.
        """
        if self._is_shut_down:
            raise shutting_down()
        pending = self._by_key.get(key)
        if pending is None:
            if segment is Segment.INLINE and self.is_full:
                raise too_many_inline()
            want = Want(
                id=next(self._ids),
                audio_sha256=key.audio_sha256,
                fingerprint=key.encoder_fingerprint,
                segment=segment.value,
                tenant=tenant,
                urgent=urgent,
                force=force,
            )
            pending = self._by_key[key] = Pending(
                key=key,
                want=want,
                landed=asyncio.get_running_loop().create_future(),
                since=time.monotonic(),
                only_worker=only_worker,
            )
            self._unseen.append(pending)
            self._count(want, 1)
            self._tell(pending)
        else:
            self._bring_forward(pending, segment, tenant, urgent=urgent, force=force)
            pending.only_worker |= only_worker
        pending.num_waiting += 1
        self._wake()
        return pending

    def leave(self, pending: Pending) -> None:
        """Stop waiting; with the last one the job ends, if it has not begun."""
        pending.num_waiting -= 1
        if not pending.num_waiting:
            self._delete(pending)

    def end(self, key: EncodingKey) -> None:
        """End the waiting for an encoding whose audio is gone."""
        if (pending := self._by_key.get(key)) is not None:
            self._fail(pending, AudioGoneError(key.audio_sha256))

    def shutdown(self) -> None:
        """Stop asking; who waits is told so, and who comes later."""
        self._is_shut_down = True
        self._fail_all(shutting_down())
        if self._task is not None:
            self._task.cancel()

    # -------- what is waited for

    def _bring_forward(
        self,
        pending: Pending,
        segment: Segment,
        tenant: str,
        *,
        urgent: bool,
        force: bool,
    ) -> None:
        """Take in what one more caller asks for."""
        was = pending.want
        is_voice = Segment.REGISTERED in (segment, Segment(was.segment))
        segment = Segment.REGISTERED if is_voice else Segment.INLINE
        now_forced = force and not was.force
        want = structs.replace(
            was,
            # An encode in hand may have begun before it was to be made anew.
            id=next(self._ids) if now_forced else was.id,
            segment=segment.value,
            tenant=tenant,  # the worker has it wait for the others as well
            urgent=urgent or was.urgent,
            force=force or was.force,
        )
        if want == was:
            return
        if now_forced:
            self._forget(pending)
        self._count(was, -1)
        self._count(want, 1)
        pending.want = want
        self._tell(pending)

    def _tell(self, pending: Pending) -> None:
        want = pending.want
        self._untold[False].pop(want.id, None)
        self._by_id[want.id] = self._untold[want.urgent][want.id] = pending

    def _count(self, want: Want, change: int) -> None:
        self._num_inline += change * (want.segment == Segment.INLINE.value)

    def _forget(self, pending: Pending) -> None:
        """Have the workers give up the want, if they may know of it."""
        number = pending.want.id
        del self._by_id[number]
        self._untold[pending.want.urgent].pop(number, None)
        if pending.was_sent:
            self._withdrawn[number] = None
        pending.was_sent = False

    def _delete(self, pending: Pending) -> None:
        # Others may want the same by now, after all who waited for this one left.
        if self._by_key.get(pending.key) is pending:
            del self._by_key[pending.key]
            self._count(pending.want, -1)
            self._forget(pending)

    def _land(self, pending: Pending) -> None:
        self._delete(pending)
        if not pending.landed.done():
            pending.landed.set_result(None)

    def _fail(self, pending: Pending, error: TTSCacheError) -> None:
        self._delete(pending)
        if not pending.landed.done():
            pending.landed.set_exception(error)
            pending.landed.exception()  # the callers may all have left

    def _fail_all(self, error: TTSCacheError) -> None:
        for pending in list(self._by_key.values()):
            self._fail(pending, error)

    # -------- the task

    def _wake(self) -> None:
        self._changed.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run())
            self._task.add_done_callback(self._ended)

    async def _run(self) -> None:
        self._last_id = _NO_NUMBER
        while self._by_key:
            self._changed.clear()
            pause_seconds = LOOK_SECONDS
            try:
                await self._look()
                if self._is_due(time.monotonic()):
                    await self._ask_and_look()
                    self._outage_since = None
            except TTSCacheError as exc:
                self._bear(exc)
                pause_seconds = MIN_ASK_SECONDS
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), pause_seconds)

    def _bear(self, error: TTSCacheError) -> None:
        """Fail who has waited for as long as an outage may last."""
        now = time.monotonic()
        if self._outage_since is None:
            self._outage_since = now
        is_final = self._workers.have_ended or isinstance(error, UnsupportedModelError)
        for pending in list(self._by_key.values()):
            waited_seconds = now - max(pending.since, self._outage_since)
            if is_final or waited_seconds >= OUTAGE_SECONDS:
                self._fail(pending, error)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            # A mistake of ours must not leave callers waiting for ever.
            message = "Waiting for encodings: %r"
            throttled.warn_of("waiting", message, error, mistake=error)
            self._fail_all(EncodeError(f"waiting for it failed: {error!r}"))
        if self._by_key:
            self._wake()

    # -------- the catalogue

    async def _look(self) -> None:
        """Land what the catalogue has.

        Raises: StorageError.
        """
        look = self._store.stored_since
        self._last_id, keys = await self._lookups.run(look, self._last_id)
        self._num_stored_since += len(keys)
        for pending in filter(None, map(self._by_key.get, keys)):
            self._land_stored(pending)
        if not (unseen := self._unseen.copy()):
            return
        # Of those that came what was stored before the number that was asked from.
        shas = sorted({pending.key.audio_sha256 for pending in unseen})
        kinds = await self._lookups.run(self._store.stored_kinds, shas)
        del self._unseen[: len(unseen)]
        for pending in unseen:
            if pending.key.encoder_fingerprint in kinds[pending.key.audio_sha256]:
                self._land_stored(pending)

    def _land_stored(self, pending: Pending) -> None:
        # What is forced is stored already; the worker tells when it is anew.
        if not pending.want.force and not pending.only_worker:
            self._land(pending)

    # -------- the workers

    def _is_due(self, now: float) -> bool:
        quiet_seconds = now - self._asked_at
        # While the host waits for an answer it hands on nobody's request.
        if quiet_seconds < max(MIN_ASK_SECONDS, self._answer_seconds):
            return False
        rest_seconds = RENEW_SECONDS if self._num_stored_since else ASK_SECONDS
        return any(self._untold.values()) or quiet_seconds >= rest_seconds

    async def _ask_and_look(self) -> None:
        """Ask the workers, and go on looking into the catalogue until they answer.

        A diffusion model's does between two batches, and what was encoded during one is
        to be spoken with in the next.

        Raises: WorkerRPCError, StorageError.
        """
        asking = asyncio.create_task(self._ask())
        try:
            while not (await asyncio.wait([asking], timeout=LOOK_SECONDS))[0]:
                await self._look()
        finally:
            asking.cancel()
            # Nothing of it is left for the next time, nor is its error for nobody.
            await asyncio.gather(asking, return_exceptions=True)
        await asking

    async def _ask(self) -> None:
        """Tell the workers what is new, and take in which wants have ended.

        What was told is told again unless the answer comes: it may not have arrived.

        Raises: WorkerRPCError.
        """
        untold = chain(self._untold[True].values(), self._untold[False].values())
        told = [(pending, pending.want) for pending in islice(untold, MAX_NEW)]
        withdrawn = list(islice(self._withdrawn, MAX_WITHDRAWN))
        # The next answer may take as long, and the lease is to last until then.
        lease_seconds = LEASE_SECONDS + 3 * self._answer_seconds
        new = [want for _, want in told]
        for pending, _ in told:
            pending.was_sent = True
        call = WantCall(self._client_id, new, withdrawn, lease_seconds)
        self._num_stored_since = 0
        num_replicas, self._num_replicas = self._num_replicas, 0
        began_at = time.monotonic()
        try:
            answers = await self._workers.call(WANT, call)
        except WorkerBusyError:
            self._expire()  # who waits has a patience of its own
            return
        finally:
            # From here on: what the host is asked meanwhile waits behind this call.
            self._asked_at = time.monotonic()
            self._answer_seconds = self._asked_at - began_at
        answers = [answer for answer in answers if answer.rank == 0]
        for number in withdrawn:
            self._withdrawn.pop(number)
        self._num_replicas = len(answers)
        if num_replicas != len(answers) or not all(a.knew_client for a in answers):
            # The lease ran out, a worker is new, or an answer was lost that said so.
            for pending in self._by_id.values():
                self._tell(pending)
        for pending, want in told:
            if pending.want == want:
                self._untold[want.urgent].pop(want.id, None)
        self._take_in(answers)
        self._expire()

    def _take_in(self, answers: Sequence[WantAnswer]) -> None:
        num_finished = sum(answer.num_finished for answer in answers)
        if num_finished != self._num_finished:
            self._num_finished = num_finished
            self._progress_at = time.monotonic()
        self._in_hand = []
        reports = defaultdict[int, list[WantReport]](list)
        for answer in answers:
            for report in answer.reports:
                reports[report.id].append(report)
        for number, of_replicas in reports.items():
            if (pending := self._by_id.get(number)) is not None:
                self._take_in_reports(pending, of_replicas, len(answers))
            else:
                self._withdrawn[number] = None

    def _take_in_reports(
        self, pending: Pending, reports: Sequence[WantReport], num_replicas: int
    ) -> None:
        by_state = {report.state: report for report in reports}
        if (failed := by_state.get(JobState.FAILED)) is not None:
            reason = f"The reference audio was not encoded: {failed.reason}"
            self._fail(pending, EncodeError(reason))
        elif JobState.NO_AUDIO in by_state:
            self._fail(pending, AudioGoneError(pending.key.audio_sha256))
        elif JobState.NO_ENCODER in by_state:
            self._fail(pending, EncodersChangedError())
        elif JobState.REFUSED in by_state:
            self._fail(pending, too_many_inline())
        elif by_state.keys() == {JobState.READY} and len(reports) == num_replicas:
            self._land(pending)
        elif (encoding := by_state.get(JobState.ENCODING)) is not None:
            pending.since = time.monotonic() - encoding.encoding_seconds
            self._in_hand.append(pending)

    def _expire(self) -> None:
        limit = time.monotonic() - self._timeout_seconds
        # While the workers get on, others are before those that wait.
        is_stuck = self._progress_at < limit
        late = list(self._by_key.values()) if is_stuck else self._in_hand
        for pending in late:
            if pending.since < limit:
                self._fail(pending, timed_out(self._timeout_seconds))


def too_many_inline() -> ServerBusyError:
    """Why an inline encoding is refused, here or by a worker."""
    return ServerBusyError(
        "too many inline references wait to be encoded", RETRY_AFTER_SECONDS
    )


def shutting_down() -> ServerBusyError:
    """Why callers wait no longer when the server ends."""
    return ServerBusyError("it is shutting down", RETRY_AFTER_SECONDS)


def too_long_in_line(seconds: float) -> ServerBusyError:
    """Why a request waits no longer although the workers get on."""
    what = f"others were encoded for {seconds:g} s before this reference audio"
    return ServerBusyError(what, RETRY_AFTER_SECONDS)


def timed_out(seconds: float) -> EncodeTimeoutError:
    """Why callers wait no longer for what nobody gets on with."""
    return EncodeTimeoutError(
        f"The reference audio was not encoded within {seconds:g} s; it may still be "
        "under way. Try again, or raise SPEAKER_CACHE_ENCODE_TIMEOUT_SECONDS."
    )
