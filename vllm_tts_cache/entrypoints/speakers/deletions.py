"""Carries out what deleting or replacing a voice leaves to do, in all processes."""

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from vllm_tts_cache import errors
from vllm_tts_cache.audio.reference import AUDIO
from vllm_tts_cache.catalogue.deletions import Deletion, DeletionProgress
from vllm_tts_cache.catalogue.names import is_consent_id
from vllm_tts_cache.catalogue.records import IdempotencyKey
from vllm_tts_cache.entrypoints.speakers.ensure import SpeakerEncodings
from vllm_tts_cache.entrypoints.speakers.executors import BoundedExecutor
from vllm_tts_cache.entrypoints.speakers.kv_warming import KVWarming
from vllm_tts_cache.entrypoints.speakers.lookups import (
    LastRows,
    ReadExecutor,
    boot_seconds,
)
from vllm_tts_cache.entrypoints.speakers.served_model import ServedModel
from vllm_tts_cache.logs import ThrottledLog, logger
from vllm_tts_cache.speaker.rpc_client import (
    DELETE,
    DELETE_STATES,
    UnsupportedModelError,
)
from vllm_tts_cache.speaker.wire import DeleteCall
from vllm_tts_cache.store.recovery import recover_aside
from vllm_tts_cache.store.speaker_store import SpeakerStore

throttled = ThrottledLog()

# A running encode, or an API server that is busy, may hold a deletion up. After this
# long the answer says how far it is.
PATIENCE_SECONDS = 15.0
PROGRESS_SECONDS = 0.1
ROUND_SECONDS = 0.25
MIN_ROUND_SECONDS = 0.05
AFTER_ERROR_SECONDS = 2.0
# The process that began a deletion removes its files at once, or is dead, or cannot.
ORPHANED_SECONDS = 5.0
# How soon after it expires a voice is deleted; requests find no expired voice.
EXPIRY_SECONDS = 1.0
MAX_EXPIRED = 32  # in one transaction, whose log fits into the ballast
SWEEP_SECONDS = 10.0
# A shutdown does not wait for all files; the next start goes on.
RECOVER_PATIENCE_SECONDS = 2.0
# After an outage of the catalogue: at most so often, and within so long.
RECOVERY_SECONDS = 300.0
RECOVERY_SPREAD_SECONDS = 120.0
MAX_WAITING = 64
# A disk or an object store that does not answer holds up a removal for a minute.
NUM_REMOVALS = 3
# In one call of `_confirm`; the next one begins with what was deleted meanwhile.
MAX_CONFIRMED, MAX_SEEN = 32, 256


class Deletions:
    """Carries deletions out, and takes part in those of other API processes.

    A deletion's row goes first, then its files, then what workers and API processes
    remember. Loops of their own read what is to be done, remove files, and confirm:
    none waits for another, and none ends at one failure. What is to be done is in the
    catalogue, so another process goes on after this one. For the event loop only.

    Args:
        memories: What this process remembers of audios: each has a ``delete``, which
            takes the address of one, and a ``delete_all``.
    """

    def __init__(
        self,
        store: SpeakerStore,
        lookups: ReadExecutor,
        encodings: SpeakerEncodings,
        model: ServedModel,
        last_rows: LastRows,
        kv_warming: KVWarming,
        memories: Sequence[Any],
    ):
        self._store = store
        self._last_rows, self._kv_warming = last_rows, kv_warming
        self._lookups = lookups
        self._encodings = encodings
        self._model = model
        self._memories = memories
        # The last absence after which workers deleted all; audios still encoded then.
        self._deleted_after, self._busy = 0, set[str]()
        # By id: what a client deleted is removed before what it replaced.
        self._deleted: dict[int, Deletion] = {}
        self._replaced: dict[int, Deletion] = {}
        self._in_removal = set[int]()  # among them those that are tried again later
        self._orphans: dict[int, float] = {}
        self._next_expiry = self._next_sweep = 0.0
        self._has_expired = self._is_asked = False
        self._woken: list[asyncio.Event] = []  # of each loop
        self._tasks: list[asyncio.Task[None]] = []
        self._is_shut_down = False
        self._recovering: threading.Thread | None = None
        self._was_down, self._num_cut_off = False, 0
        self._recovered_at = 0.0
        self._recover_at: float | None = None  # when to recover after an outage
        self._clients = BoundedExecutor(
            "too many deletions wait", num_threads=2, max_waiting=MAX_WAITING
        )
        # Never behind clients, and never refused: each loop waits for its own call.
        self._own = BoundedExecutor("a round", num_threads=1, max_waiting=MAX_WAITING)
        self._removals = BoundedExecutor(
            "removing files", num_threads=NUM_REMOVALS + 1, max_waiting=MAX_WAITING
        )

    def start(self) -> None:
        """Join the participants, and finish what killed processes began."""
        self._store.participants.join()
        removals = [self._remove_files] * NUM_REMOVALS
        for work in (self._round, self._confirm, self._sweep, *removals):
            self._tasks.append(asyncio.create_task(self._repeat(work)))
        self._recover()

    def _recover(self) -> None:
        self._recovered_at, self._recover_at = time.monotonic(), None
        self._recovering = recover_aside(self._store.recover)

    def shutdown(self) -> None:
        """Leave the participants; others, or the next start, do what is left."""
        self._is_shut_down = True
        for task in self._tasks:
            task.cancel()
        if self._recovering is not None:
            self._recovering.join(RECOVER_PATIENCE_SECONDS)
        for threads in (self._clients, self._own, self._removals):
            threads.shutdown()
        try:
            self._store.participants.leave()
        except errors.StorageError as exc:
            message = "Leaving failed, so deletions may wait for this server: %s"
            logger.warning(message, exc.log_text)

    async def delete(
        self, name: str, tenant: str, key: str | None = None
    ) -> str | None:
        """Delete a tenant's voice; returns its id when it is deleted everywhere.

        Called again, it waits for the last deletion of that name or id; with the same
        ``key``, the request's ``Idempotency-Key``, after the end of that as well.

        Raises:
            InvalidSpeakerError: A different request had the key.
            SpeakerNotFoundError: There is no such voice, and no deletion of one.
            DeletionPendingError: The deletion is not finished, and goes on.
            StorageError: The catalogue failed; nothing was changed.
        """
        if is_consent_id(name):
            raise errors.SpeakerNotFoundError(name)
        its_key = IdempotencyKey.of(key, tenant, "DELETE", name)
        delete = partial(self._store.registrations.delete, key=its_key)
        return await self._delete(name, tenant, delete)

    async def delete_consent(self, consent_id: str, tenant: str) -> None:
        """Delete a tenant's consent recording, as `delete` does a voice.

        Raises: As `delete`, with ConsentNotFoundError; ConsentInUseError: Voices stand
            on it.
        """
        if not is_consent_id(consent_id):
            raise errors.ConsentNotFoundError(consent_id)
        await self._delete(consent_id, tenant, self._store.consents.delete)

    async def _delete(
        self, name: str, tenant: str, delete: Callable[[str, str], Deletion]
    ) -> str | None:
        async def look() -> DeletionProgress | None:
            # Not by `_lookups`: it may delete participants that died.
            return await self._clients.run(self._store.progress, name, tenant)

        try:
            deletion = await self._clients.run(delete, name, tenant)
        except (errors.SpeakerNotFoundError, errors.ConsentNotFoundError):
            if (progress := await look()) is None:
                raise
            public_id = progress.public_id
        except errors.AlreadyDoneError as exc:
            public_id = exc.speaker_id
        else:
            public_id = deletion.public_id
            self.carry_out(deletion)
        until = time.monotonic() + PATIENCE_SECONDS
        while (progress := await look()) is not None and not progress.is_finished:
            if time.monotonic() > until:
                raise errors.DeletionPendingError(
                    name,
                    files_removed=progress.files_removed,
                    waiting_for=progress.waiting_for,
                )
            await asyncio.sleep(PROGRESS_SECONDS)
        if progress is not None:  # else another caller acknowledged it
            await self._clients.run(self._store.acknowledge, progress.id)
        return public_id

    def carry_out(self, deletion: Deletion) -> None:
        """Remove a deletion's files soon, and have all processes delete its audio."""
        if deletion.id not in self._in_removal:
            queue = self._replaced if deletion.public_id is None else self._deleted
            queue[deletion.id] = deletion
            self._wake()

    async def _repeat(self, work: Callable[[], Awaitable[None]]) -> None:
        """Call ``work`` now and then, when it is woken, and again after an error."""
        pause_seconds, woken = ROUND_SECONDS, asyncio.Event()
        self._woken.append(woken)
        woken.set()
        # Before Python 3.12 `wait_for` may swallow a cancellation.
        while not self._is_shut_down:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(woken.wait(), pause_seconds)
            woken.clear()
            try:
                await work()
                pause_seconds = ROUND_SECONDS
            except Exception as exc:  # noqa: BLE001  without it no DELETE would end
                self._note_error(exc)
                pause_seconds = AFTER_ERROR_SECONDS
            await asyncio.sleep(MIN_ROUND_SECONDS)

    def _wake(self) -> None:
        for woken in self._woken:
            woken.set()

    def _note_error(self, error: Exception) -> None:
        if isinstance(error, errors.StorageUnavailableError):
            self._was_down |= error.was_cut_off
        self._is_asked = True
        reason = errors.log_text_of(error)
        throttled.warn_of("deleting", "A deletion is not finished: %s", reason)

    def _recover_after_outage(self) -> None:
        """Recover in a while after an outage: it may have left files without rows."""
        now = time.monotonic()
        # A write that a client waited for, while no round looked, counts as well.
        num_cut_off = self._store.database.num_cut_off
        self._was_down |= num_cut_off != self._num_cut_off
        self._num_cut_off = num_cut_off
        if self._was_down and (self._recover_at is None or self._recover_at < now):
            # It looks at all files: so seldom, and not on all servers at once.
            soonest = max(now, self._recovered_at + RECOVERY_SECONDS)
            self._recover_at = soonest + random.uniform(0, RECOVERY_SPREAD_SECONDS)
        self._was_down = False
        is_running = self._recovering is not None and self._recovering.is_alive()
        if self._recover_at is not None and self._recover_at < now and not is_running:
            self._recover()

    async def _round(self) -> None:
        """Read what to do, and how long last rows are good. Raises: StorageError."""
        asked_at = boot_seconds()
        standing = await self._lookups.run(self._store.participants.standing)
        self._last_rows.good_for(standing.seconds, asked_at, standing.epoch)
        self._has_expired = standing.has_expired
        self._is_asked |= standing.is_asked
        if standing.has_files_left or self._orphans:
            await self._adopt_orphans()
        self._recover_after_outage()

    async def _delete_expired(self) -> None:
        """Begin to delete expired voices, of many some. Raises: StorageError."""
        now = time.monotonic()
        # No more than a client's deletion may wait for.
        if now < self._next_expiry or len(self._deleted) >= MAX_EXPIRED:
            return
        self._next_expiry = now + EXPIRY_SECONDS
        if not await self._lookups.run(self._store.has_expired):
            return
        delete_expired = self._store.registrations.delete_expired
        for deletion in await self._own.run(delete_expired, MAX_EXPIRED):
            self.carry_out(deletion)
            self._next_expiry = now  # there may be more

    async def _remove_files(self) -> None:
        """Remove the files of all deletions, of one after another."""
        while queue := self._deleted or self._replaced:
            deletion = queue.pop(next(iter(queue)))
            self._in_removal.add(deletion.id)
            try:
                await self._removals.run(self._store.remove_files, deletion)
            except Exception as exc:  # noqa: BLE001  it is tried again, after others
                self._note_error(exc)
                later = asyncio.get_running_loop().call_later
                later(AFTER_ERROR_SECONDS, self._remove_again, deletion)
            else:
                self._in_removal.discard(deletion.id)
                self._is_asked = True
                self._wake()

    def _remove_again(self, deletion: Deletion) -> None:
        self._in_removal.discard(deletion.id)
        self.carry_out(deletion)

    async def _confirm(self) -> None:
        """Delete what deletions name from this process and its workers, and confirm it.

        Raises: WorkerRPCError, StorageError; of one deletion, once the others are done.
        """
        if self._has_expired:
            await self._delete_expired()
        await self._delete_all_if_missed()
        if not self._is_asked:
            return
        self._is_asked = False
        waiting = await self._lookups.run(self._store.participants.deletions_to_confirm)
        if not waiting:
            return
        audios = {d.audio_sha256 for d in waiting if d.audio_sha256 is not None}
        stored = await self._lookups.run(self._store.stored_artifacts, sorted(audios))
        # Audio that other voices have stays: workers know no names or transcripts.
        gone = sorted(sha for sha in audios if AUDIO not in stored[sha])
        busy = await self._delete_in_workers(DeleteCall(audio_sha256s=gone))
        num_left, error = MAX_CONFIRMED, None
        for deletion in waiting:
            if deletion.audio_sha256 in busy or not num_left:
                self._is_asked = True
                continue
            try:
                await self._confirm_one(deletion)
                num_left -= 1
            except errors.StorageError as exc:
                error = exc
        if not num_left:
            self._wake()
        if error is not None:
            raise error

    async def _confirm_one(self, deletion: Deletion) -> None:
        self._last_rows.delete(deletion.public_id, deletion.audio_sha256)
        if deletion.public_id is not None:
            self._kv_warming.delete(deletion.public_id)
        if (sha := deletion.audio_sha256) is not None:
            # After the workers, from which a prompt could have been built again.
            for memory in self._memories:
                memory.delete(sha)
            if (copies := self._store.copies) is not None:
                await self._own.run(copies.delete_unstored, sha)
            if not await self._lookups.run(self._store.has_audio, sha):
                self._encodings.pending.end(sha)
        await self._own.run(self._store.participants.confirm, deletion.id)

    async def _delete_all_if_missed(self) -> None:
        """Delete all that is remembered after an absence. Raises: WorkerRPCError."""
        if (absence := self._store.participants.missed()) is None:
            return
        again = DeleteCall(audio_sha256s=sorted(self._busy))
        if absence != self._deleted_after:
            again = DeleteCall(audio_sha256s=[], everything=True)
        self._busy = await self._delete_in_workers(again)
        self._deleted_after = absence
        if not self._busy:
            # After the workers, from which a prompt could have been built again.
            for memory in (self._last_rows, self._kv_warming, *self._memories):
                memory.delete_all()
            self._store.participants.has_deleted_all(absence)
            # Recovering removes the copies of what was deleted meanwhile.
            self._recover_at = time.monotonic()

    async def _delete_in_workers(self, call: DeleteCall) -> set[str]:
        """Delete in workers; return audios still busy there. Raises: WorkerRPCError."""
        workers = self._encodings.cloning_workers()
        is_empty = not (call.audio_sha256s or call.everything)
        if is_empty or workers is None or workers.have_ended:
            return set()
        try:
            answers = await workers.call(DELETE, call)
        except UnsupportedModelError:
            return set()
        await self._model.call_decoders(workers, DELETE_STATES, call)
        return {sha for answer in answers for sha in answer.busy}

    async def _sweep(self) -> None:
        """Remove objects without a row, now and then. Raises: StorageError."""
        if (now := time.monotonic()) >= self._next_sweep:
            self._next_sweep = now + SWEEP_SECONDS
            await self._removals.run(self._store.participants.delete_dead)
            # Last, as it fails for as long as the disk does.
            await self._removals.run(self._store.sweep)

    async def _adopt_orphans(self) -> None:
        """Go on with removals that another process left. Raises: StorageError."""
        now = time.monotonic()
        unfinished = await self._own.run(self._store.unfinished_deletions, MAX_SEEN)
        self._orphans = {d.id: self._orphans.get(d.id, now) for d in unfinished}
        for deletion in unfinished:
            if now - self._orphans[deletion.id] > ORPHANED_SECONDS:
                self.carry_out(deletion)
