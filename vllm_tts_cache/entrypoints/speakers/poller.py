"""The one place of a process that asks workers how far encodings are."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Sequence

from vllm_tts_cache.catalogue.records import Segment
from vllm_tts_cache.entrypoints.speakers.lookups import ReadExecutor
from vllm_tts_cache.entrypoints.speakers.wants import (
    AudioGoneError,
    Want,
    Wants,
    shutting_down,
    timed_out,
    too_many_inline,
)
from vllm_tts_cache.errors import EncodeError, TTSCacheError
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.speaker.rpc_client import WANT, AsyncWorkers, WorkerBusyError
from vllm_tts_cache.speaker.wire import JobReport, JobState, WantAnswer, WantCall
from vllm_tts_cache.store.encoding import EncodingKey
from vllm_tts_cache.store.speaker_store import SpeakerStore

throttled = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))

# A worker is told of so many at a time; the others wait here, where nobody pays.
MAX_OUTSTANDING = 64
LEASE_SECONDS = 2.0
# Asking a worker takes it off decoding for half a millisecond; asking the catalogue
# costs nobody anything. So the worker is asked for what the catalogue cannot tell: a
# failure, or a full disk. While encodings arrive, only leases are renewed.
LOOK_SECONDS = 0.02
ASK_SECONDS = 0.25
RENEW_SECONDS = LEASE_SECONDS / 2
# What is new is told at once, but no more often than this.
MIN_ASK_SECONDS = 0.125
_NO_NUMBER = -1  # what the catalogue answers with the number to begin from


class EncodePoller:
    """Asks the catalogue often and the workers seldom, for all callers together.

    It runs while somebody waits. For the event loop only.

    Args:
        timeout_seconds: Longest encode, and longest time without any progress of the
            worker, that a caller waits for.
        max_waiting_inline: Inline wants at once; one more is refused.
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
        self._wants = Wants(max_waiting_inline)
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_shut_down = False
        self._last_id = _NO_NUMBER
        self._asked_at = 0.0  # when the last answer came
        self._answer_seconds = 0.0  # how long it took
        self._num_stored_since = 0  # since the workers were asked
        self._has_news = False  # likewise: somebody came, or came forward
        self._num_finished = -1
        self._progress_at = 0.0
        self._in_hand: list[Want] = []  # of the encode threads, when asked last

    def __len__(self) -> int:
        """Encodings that are waited for."""
        return len(self._wants)

    def __contains__(self, key: EncodingKey) -> bool:
        """Tell whether anybody waits for this encoding."""
        return key in self._wants

    @property
    def is_full(self) -> bool:
        """Whether one more inline want would be refused."""
        return self._wants.is_full

    def join(
        self,
        key: EncodingKey,
        encoder: str,
        segment: Segment,
        *,
        urgent: bool,
        force: bool = False,
        is_doubted: bool = False,
    ) -> Want:
        """Want an encoding; the caller waits for ``landed`` and then leaves.

        Args:
            key: Which encoding.
            encoder: The name that workers know its encoder by.
            segment: Whose it is.
            urgent: Whether a request waits.
            force: Encode although it exists.
            is_doubted: Whether the worker is to look although the catalogue has it.

        Raises: ServerBusyError.
        """
        if self._is_shut_down:
            raise shutting_down()
        how = {"urgent": urgent, "force": force, "is_doubted": is_doubted}
        want = self._wants.join(key, encoder, segment, **how)
        self._has_news |= not want.is_told
        self._wake()
        return want

    def leave(self, want: Want, *, urgent: bool) -> None:
        """Stop waiting; with the last one the want ends, and in time the job too."""
        self._wants.leave(want, urgent=urgent)

    def end(self, key: EncodingKey) -> None:
        """End a want whose audio is gone, if there is one."""
        if (want := self._wants.get(key)) is not None:
            self._wants.fail(want, AudioGoneError(key.audio_sha256))

    def shutdown(self) -> None:
        """Stop asking; who waits is told so, and who comes later."""
        self._is_shut_down = True
        self._wants.fail_all(shutting_down())
        if self._task is not None:
            self._task.cancel()

    def _wake(self) -> None:
        self._news.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run())
            self._task.add_done_callback(self._ended)

    async def _run(self) -> None:
        self._last_id = _NO_NUMBER
        while self._wants:
            self._news.clear()
            try:
                await self._look()
                if self._is_due(time.monotonic()):
                    await self._ask_and_look()
            except TTSCacheError as exc:
                self._wants.fail_all(exc)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), LOOK_SECONDS)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            # A mistake of ours must not leave callers waiting for ever.
            message = "Waiting for encodings: %r"
            throttled.warn_of("waiting", message, error, mistake=error)
            self._wants.fail_all(EncodeError(f"waiting for it failed: {error!r}"))
        if self._wants:
            self._wake()

    # -------- the catalogue

    async def _look(self) -> None:
        """Land what the catalogue has.

        Raises: StorageError.
        """
        look = self._store.stored_since
        self._last_id, keys = await self._lookups.run(look, self._last_id)
        self._num_stored_since += len(keys)
        for want in filter(None, map(self._wants.get, keys)):
            self._land_stored(want)
        await self._look_up(self._wants.take_new())

    async def _look_up(self, new: list[Want]) -> None:
        """Land what was stored before the first number that we asked for."""
        if not new:
            return
        shas = sorted({want.key.audio_sha256 for want in new})
        kinds = await self._lookups.run(self._store.stored_kinds, shas)
        for want in new:
            if want.key.encoder_fingerprint in kinds[want.key.audio_sha256]:
                self._land_stored(want)

    def _land_stored(self, want: Want) -> None:
        # What is forced is stored already; the worker tells when it is anew.
        if not want.force_id and not want.is_doubted:
            self._wants.land(want)

    # -------- the workers

    def _is_due(self, now: float) -> bool:
        quiet_seconds = now - self._asked_at
        # While the host waits for an answer it hands on nobody's request.
        if quiet_seconds < max(MIN_ASK_SECONDS, self._answer_seconds):
            return False
        first = self._wants.first(MAX_OUTSTANDING)
        if self._has_news and not all(want.is_told for want in first):
            return True
        num_told = sum(want.is_told for want in first)
        arriving = self._num_stored_since and 2 * num_told >= len(first)
        return quiet_seconds >= (RENEW_SECONDS if arriving else ASK_SECONDS)

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
        """Tell the workers what is wanted, and take in how far they are.

        Raises: WorkerRPCError.
        """
        told = [(w, w.to_wire()) for w in self._wants.first(MAX_OUTSTANDING)]
        self._num_stored_since = 0
        self._has_news = False
        for want, _ in told:
            want.is_told = True
        # The next answer may take as long, and a lease is to last until then.
        lease_seconds = LEASE_SECONDS + 3 * self._answer_seconds
        call = WantCall(wants=[w for _, w in told], lease_seconds=lease_seconds)
        began_at = time.monotonic()
        try:
            answers = await self._workers.call(WANT, call)
        except WorkerBusyError:
            # No encode has failed, and who waits has a patience of its own.
            for want, _ in told:
                want.is_told = False
            self._has_news = True
            self._expire()
            return
        finally:
            # From here on: what the host is asked meanwhile waits behind this call.
            self._asked_at = time.monotonic()
            self._answer_seconds = self._asked_at - began_at
        self._note_progress(answers)
        for want in self._in_hand:  # of one that others came before nothing is known
            want.is_encoding = False
        reports = reports_of(answers)
        for want, as_told in told:
            if want.force_id == as_told.force_id:
                key = as_told.audio_sha256, as_told.encoder
                self._take_in(want, reports.get(key, []))
        self._in_hand = [want for want, _ in told if want.is_encoding]
        self._expire()

    def _note_progress(self, answers: Sequence[WantAnswer]) -> None:
        num_finished = sum(answer.num_finished for answer in answers)
        if num_finished != self._num_finished:
            self._num_finished = num_finished
            self._progress_at = time.monotonic()

    def _take_in(self, want: Want, reports: list[JobReport]) -> None:
        by_state = {report.state: report for report in reports}
        want.is_encoding = JobState.ENCODING in by_state
        if (failed := by_state.get(JobState.FAILED)) is not None:
            reason = f"The reference audio was not encoded: {failed.reason}"
            self._wants.fail(want, EncodeError(reason))
        elif JobState.NO_AUDIO in by_state:
            self._wants.fail(want, AudioGoneError(want.key.audio_sha256))
        elif JobState.REFUSED in by_state:
            self._wants.fail(want, too_many_inline())
        elif by_state.keys() == {JobState.READY}:
            self._wants.land(want)
        elif want.is_encoding:
            seconds = max(report.encoding_seconds for report in reports)
            want.since = time.monotonic() - seconds

    def _expire(self) -> None:
        limit = time.monotonic() - self._timeout_seconds
        overdue = [want for want in self._in_hand if want.since < limit]
        # Else others are before those that wait, and they get on.
        if self._progress_at < limit:
            waiting = (want for want in self._wants if not want.is_encoding)
            overdue += [want for want in waiting if want.since < limit]
        for want in overdue:
            self._wants.fail(want, timed_out(self._timeout_seconds))


def reports_of(answers: Iterable[WantAnswer]) -> dict[tuple[str, str], list[JobReport]]:
    """(audio, encoder name) -> what the workers that encode say of it, one a replica.

    Only rank 0 encodes; the others load what it publishes.
    """
    found: dict[tuple[str, str], list[JobReport]] = {}
    for answer in answers:
        for report in answer.reports if answer.rank == 0 else ():
            key = report.audio_sha256, report.encoder
            found.setdefault(key, []).append(report)
    return found
