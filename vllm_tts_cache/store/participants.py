"""Participants: the API processes that confirm deletions; this one can be among them.

On one machine locked files show which of them are alive, on several machines leases.
"""

import os
import secrets
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from vllm_tts_cache.catalogue import deletions, leases
from vllm_tts_cache.catalogue.database import Database, with_ballast
from vllm_tts_cache.catalogue.deletions import Deletion
from vllm_tts_cache.catalogue.leases import Standing
from vllm_tts_cache.errors import StorageError
from vllm_tts_cache.files import storage_errors
from vllm_tts_cache.logs import ThrottledLog, logger
from vllm_tts_cache.store.directory import Presence, claim, is_alive

_FOLDER, _SUFFIX = "participants", ".lock"
_REMOVED = (
    "This API server's file in %s, which shows that it is alive, was removed. It "
    "deletes all that it and its workers have in memory, and goes on."
)

DELETE_LOST_SECONDS = 600.0


class _Participants:
    """All processes that confirm deletions; this one from `join` to `leave`.

    A forked child is not a participant.
    """

    def __init__(self, database: Database):
        self.database = database
        self._mine: str | None = None
        self._process = 0
        self._num_returns = 0  # after absences that may have missed deletions
        self._num_deleted = 0  # the last return after which memory was emptied

    @property
    def id(self) -> str | None:
        """This process's id; None unless it is a participant."""
        return self._mine if self._process == os.getpid() else None

    def deletions_to_confirm(self) -> list[Deletion]:
        """Return deletions that have no files and wait for this process, but not all.

        While files are there, they could be read into memory again.
        """
        if (mine := self.id) is None:
            return []
        with self.database.read() as db:
            return deletions.to_confirm(db, mine)

    @with_ballast
    def confirm(self, deletion_id: int) -> None:
        """Record that this process and its workers have none of its audio in memory."""
        if (mine := self.id) is None:
            return
        with self.database.write() as db:
            deletions.confirm(db, deletion_id, mine)
        self.database.backend.wipe_log()

    def missed(self) -> int | None:
        """Return a number for `has_deleted_all` if memory must be emptied, else None.

        This process was away for so long that the deletions it missed are not known any
        more. It has joined again, so new deletions wait for it.
        """
        num = self._num_returns
        return None if num == self._num_deleted else num

    def has_deleted_all(self, number: int) -> None:
        """Record that this process and its workers emptied memory after `missed`."""
        self._num_deleted = number

    def has_missed_none(self) -> bool:
        """Whether this process missed no deletion, or has emptied its memory since.

        If not, no deletion is finished, whatever the catalogue says.
        """
        return self._num_returns == self._num_deleted


class LockedParticipants(_Participants):
    """Processes of one machine, each of which holds a file's lock while it lives."""

    def __init__(self, root: Path, database: Database):
        super().__init__(database)
        self._directory = root / _FOLDER
        self._presence: Presence | None = None
        # Else one who looks while `leave` removes the file would join again.
        self._turn = threading.Lock()

    @with_ballast
    def join(self) -> str:
        """Make new deletions wait for our `confirm` while we live; return our id."""
        return self.id or self._join(None)

    def _join(self, before: str | None) -> str:
        # Locked before its row is written, else another process takes it for dead.
        if self._presence is None or not self._presence.is_here:
            self._presence = Presence(self._directory, _SUFFIX)
        mine = self._presence.path.stem
        with self.database.write() as db:
            deletions.join(db, mine)
            if before is not None:
                deletions.ask_of_unfinished(db, mine)
                deletions.leave(db, before)
        self._mine, self._process = mine, os.getpid()
        return mine

    @with_ballast
    def standing(self) -> Standing:
        """Return the standing of a process without a lease: 0 seconds, and all to do.

        Joins again if another program removed the lock file, and others took this
        process for dead. `missed` then has the caller empty its memory.
        """
        if self.id is None:  # also in a child, whose copy of the turn may be held
            return Standing(seconds=0.0)
        with self._turn:
            mine, present = self.id, self._presence
            if mine is not None and present is not None:
                with storage_errors(self._directory):
                    if not present.path.exists():
                        present.end()
                if not present.is_here or present.path.stem != mine:
                    self._join(mine)
                    self._num_returns += 1
                    logger.warning(_REMOVED, self._directory)
        return Standing(seconds=0.0)

    @with_ballast
    def leave(self) -> None:
        """End what `join` began; deletions do not wait for this process any more."""
        if self.id is None:
            return
        with self._turn:
            mine, present = self.id, self._presence  # it may have joined again
            if mine is None or present is None:
                return
            with self.database.write() as db:
                deletions.leave(db, mine)
            self.database.backend.wipe_log()
            present.path.unlink(missing_ok=True)
            present.end()
            self._presence = self._mine = None

    @with_ballast
    def delete_dead(self) -> None:
        """Delete participants whose lock is free, and unlocked lock files."""
        with self.database.read() as db:
            all_ = deletions.participants(db)
        with storage_errors(self._directory):
            dead = [id_ for id_ in all_ if not self._is_alive(id_)]
        if dead:
            with self.database.write() as db:
                for id_ in dead:
                    deletions.leave(db, id_)
            self.database.backend.wipe_log()
        with storage_errors(self._directory):
            for path in self._directory.glob(f"*{_SUFFIX}"):
                if (claimed := claim(path)) is not None:
                    path.unlink(missing_ok=True)
                    os.close(claimed)

    def num_alive(self) -> int:
        """Return how many other participants are alive."""
        with self.database.read() as db:
            others = set(deletions.participants(db)) - {self.id}
        with storage_errors(self._directory):
            return sum(map(self._is_alive, others))

    def _is_alive(self, id_: str) -> bool:
        return is_alive(self._directory / f"{id_}{_SUFFIX}")


class LeasedParticipants(_Participants):
    """Processes of any machine; deletions wait for one while it renews its lease.

    It renews on a thread of its own, so a busy process that confirms late is alive.

    A process that was away for so long that it was deleted joins again by itself, and
    then empties its memory: the deletions that it missed are not known. Until then it
    may speak voices that it finds in the catalogue, which has no row of a deleted one,
    but must not report a deletion as finished.

    Args:
        seconds: How long deletions wait for a process that does not renew its lease.
    """

    def __init__(self, database: Database, seconds: float):
        super().__init__(database)
        self._seconds = seconds
        self._left = threading.Event()
        self._is_lost = False
        self._next_delete_dead = 0.0
        self._log = ThrottledLog()

    def join(self) -> str:
        """Make new deletions wait for our `confirm` while we live; return our id."""
        if (known := self.id) is not None:
            return known
        mine = secrets.token_hex(8)
        with self.database.write() as db:
            deletions.join(db, mine)
            leases.take(db, mine, self._seconds)
        self._mine, self._process = mine, os.getpid()
        self._left, self._is_lost = threading.Event(), False
        renew = partial(self._renew_until_left, mine, self._left)
        threading.Thread(target=renew, name="tts-cache-lease", daemon=True).start()
        return mine

    def leave(self) -> None:
        """End what `join` began; deletions do not wait for this process any more."""
        if (mine := self.id) is None:
            return
        self._mine = None
        self._left.set()
        with self.database.write() as db:
            leases.end(db, mine)
            deletions.leave(db, mine)

    def has_missed_none(self) -> bool:
        """Whether this process missed no deletion, or has emptied its memory since."""
        if (mine := self.id) is None:
            return True
        # Before the flags: if `_rejoin` has just written the row, they show it below.
        with self.database.read() as db:
            is_known = leases.is_known(db, mine)
        return is_known and not self._is_lost and super().has_missed_none()

    def delete_dead(self) -> None:
        """Delete lost participants and dead turns, at most once in ten minutes.

        Deletions stop waiting for a participant before that, when its lease is over.
        """
        if (now := time.monotonic()) < self._next_delete_dead:
            return
        self._next_delete_dead = now + DELETE_LOST_SECONDS
        with self.database.read() as db:
            leases.delete_dead_turns(db)
            if not leases.lost(db):
                return
        with self.database.write() as db:
            for participant_id in leases.end_lost(db):
                deletions.leave(db, participant_id)

    def num_alive(self) -> int:
        """Return how many other participants are alive."""
        with self.database.read() as db:
            return len(leases.alive(db) - {self.id})

    def standing(self) -> Standing:
        """Return the lease's standing; 0 seconds if it may have missed deletions."""
        if (mine := self.id) is None:
            return Standing(seconds=0.0)
        found = leases.standing(self.database, mine)
        if found is None:  # lost: `_renew_until_left` joins again
            return Standing(seconds=0.0)
        is_away = self._is_lost or self.missed() is not None
        return replace(found, seconds=0.0) if is_away else found

    def _renew_until_left(self, mine: str, left: threading.Event) -> None:
        """Renew the lease until `leave`; a failure is logged and tried again."""
        while not left.wait(leases.RENEW_SECONDS):
            try:
                with self.database.renewing() as db:
                    self._is_lost |= not leases.renew(db, mine)
                if self._is_lost:
                    self._rejoin(mine, left)
            except StorageError as exc:
                self._log.warn_of("lease", "A lease was not renewed: %s", exc.log_text)

    def _rejoin(self, mine: str, left: threading.Event) -> None:
        """Join again; `missed` then has the caller empty its memory."""
        with self.database.write() as db:
            if left.is_set():  # `leave` deletes the row, or has
                return
            if not leases.is_known(db, mine):  # else an error hid the last commit
                deletions.join(db, mine)
                deletions.ask_of_unfinished(db, mine)
                leases.take(db, mine, self._seconds)
        self._num_returns += 1
        self._is_lost = False
        logger.warning(
            "This API server was away for too long to know what was deleted meanwhile. "
            "It deletes all that it and its workers have in memory, and goes on."
        )


Participants = LockedParticipants | LeasedParticipants
