"""An API process's part in deletions: who still remembers what.

Locks of files tell who lives where all are on one machine, else leases do.
"""

import logging
import os
import secrets
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from vllm_tts_cache.catalogue import deletions, leases
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.deletions import Deletion
from vllm_tts_cache.catalogue.leases import Standing
from vllm_tts_cache.errors import StorageError
from vllm_tts_cache.files import storage_errors
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.store import locks
from vllm_tts_cache.store.locks import Presence

_FOLDER, _SUFFIX = "participants", ".lock"

logger = logging.getLogger("vllm.vllm_tts_cache")

DELETE_LOST_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Participant:
    """A process that is asked about every deletion until it leaves or dies."""

    id: str


class Participants(Protocol):
    """This process among the participants; a forked child is none."""

    def join(self) -> Participant:
        """Take part from now on: each deletion waits for `confirm`, while we live."""
        ...

    def leave(self) -> None:
        """Take part no longer; nothing waits for us any more."""
        ...

    def deletions_to_confirm(self) -> list[Deletion]:
        """Deletions whose files are gone and that wait for us, oldest first.

        Only then: what is deleted before could be read from the files again.
        """
        ...

    def confirm(self, deletion_id: int) -> None:
        """Neither this process nor its workers remember anything of it."""
        ...

    def is_asked(self) -> bool:
        """Whether no deletion was missed of which something may be remembered.

        Else none is finished, whatever the catalogue says.
        """
        ...

    def missed(self) -> int | None:
        """A number, if all that is remembered is to be deleted: `has_deleted_all`.

        We were away for so long that what was deleted meanwhile is not known any more,
        and are asked about deletions again.
        """
        ...

    def has_deleted_all(self, number: int) -> None:
        """All was deleted, here and by workers, since `missed` answered this number."""
        ...

    def delete_dead(self, deletion_id: int) -> None:
        """Wait no longer for those a deletion waits for that have died."""
        ...

    def delete_all_dead(self) -> None:
        """Delete all participants that have died."""
        ...

    def delete_lost(self) -> None:
        """Delete who was away for too long, and what nobody needs any more."""
        ...

    def num_alive(self) -> int:
        """How many other processes take part."""
        ...

    def standing(self) -> Standing:
        """How long deletions wait for us, and what there is to be done of them.

        Raises: StorageError.
        """
        ...


class LockedParticipants:
    """A process of the one machine, which holds the lock of a file while it lives."""

    def __init__(self, root: Path, database: Database):
        self._directory = root / _FOLDER
        self._database = database
        self._presence: Presence | None = None

    def join(self) -> Participant:
        """Take part from now on."""
        if (mine := self._mine()) is not None:
            return Participant(mine)
        # Locked before it is known, or somebody would take it for dead.
        present = Presence(self._directory, _SUFFIX)
        with self._database.write() as db:
            deletions.join(db, present.path.stem)
        self._presence = present
        return Participant(present.path.stem)

    def leave(self) -> None:
        """Take part no longer; nothing waits for us any more."""
        if (mine := self._mine()) is None or self._presence is None:
            return
        with self._database.write() as db:
            deletions.leave(db, mine)
        self._database.wipe_log()
        self._presence.path.unlink(missing_ok=True)
        self._presence.end()
        self._presence = None

    def deletions_to_confirm(self) -> list[Deletion]:
        """Deletions that wait for us, oldest first."""
        if (mine := self._mine()) is None:
            return []
        with self._database.read() as db:
            return deletions.to_confirm(db, mine)

    def confirm(self, deletion_id: int) -> None:
        """Neither this process nor its workers remember anything of it."""
        if (mine := self._mine()) is None:
            return
        with self._database.write() as db:
            deletions.confirm(db, deletion_id, mine)
        self._database.wipe_log()

    def is_asked(self) -> bool:
        """Always: it is waited for while it lives, however slow it is."""
        return True

    def missed(self) -> int | None:
        """Nothing, for the same reason."""
        return None

    def has_deleted_all(self, number: int) -> None:
        """Nothing."""

    def delete_dead(self, deletion_id: int) -> None:
        """Wait no longer for those a deletion waits for that have died."""
        with self._database.read() as db:
            waited_for = deletions.waited_for(db, deletion_id)
        self._delete_dead_among(waited_for)

    def delete_all_dead(self) -> None:
        """Delete all participants that have died."""
        with self._database.read() as db:
            all_ = deletions.participants(db)
        self._delete_dead_among(all_)
        with storage_errors(self._directory):
            for path in self._directory.glob(f"*{_SUFFIX}"):
                if (claimed := locks.claim(path)) is not None:
                    path.unlink(missing_ok=True)
                    os.close(claimed)

    def delete_lost(self) -> None:
        """Delete who has died, and what the catalogue's log says of deleted voices.

        Nobody may ask about a deletion again whose server was killed. And whoever ended
        one could not empty the log beside somebody who reads, or died before that.
        """
        with self._database.read() as db:
            all_ = deletions.participants(db)
        self._delete_dead_among(all_)
        self._database.wipe_log()

    def num_alive(self) -> int:
        """How many other processes take part."""
        with self._database.read() as db:
            all_ = deletions.participants(db)
        mine = self._mine()
        with storage_errors(self._directory):
            return sum(
                locks.is_alive(self._directory / f"{id_}{_SUFFIX}")
                for id_ in all_
                if id_ != mine
            )

    def standing(self) -> Standing:
        """There is no lease: this process is waited for while it lives."""
        return Standing(seconds=0.0)

    def _delete_dead_among(self, ids: list[str]) -> None:
        with storage_errors(self._directory):
            dead = [
                id_
                for id_ in ids
                if not locks.is_alive(self._directory / f"{id_}{_SUFFIX}")
            ]
        if dead:
            with self._database.write() as db:
                for id_ in dead:
                    deletions.leave(db, id_)
            self._database.wipe_log()

    def _mine(self) -> str | None:
        present = self._presence
        if present is None or not present.is_here:
            return None
        return present.path.stem


class LeasedParticipants:
    """A process of any machine, which is waited for while it renews its lease.

    On a thread of its own: a process that is busy, and confirms late, is alive.

    One that was away for so long that it was deleted joins anew by itself, and then
    has everything deleted that it remembers: what it missed, nobody knows. Until then
    it may speak what it finds by rows that it reads in the catalogue, which knows of no
    deleted voice. What it may not do is to say that a deletion is finished.

    Args:
        seconds: For how long it is waited for without a word of it.
    """

    def __init__(self, database: Database, seconds: float):
        self._database = database
        self._seconds = seconds
        self._mine: str | None = None
        self._process = 0
        self._left = threading.Event()
        self._is_lost = False
        self._num_returns = 0
        self._num_deleted = 0  # of returns, those after which all was deleted
        self._next_delete_lost = 0.0
        self._log = ThrottledLog(logger)

    def join(self) -> Participant:
        """Take part from now on."""
        if self._is_here():
            return Participant(str(self._mine))
        mine = secrets.token_hex(8)
        with self._database.write() as db:
            deletions.join(db, mine)
            leases.take(db, mine, self._seconds)
        self._mine, self._process = mine, os.getpid()
        self._left, self._is_lost = threading.Event(), False
        threading.Thread(
            target=self._keep,
            args=(mine, self._left),
            name="tts-cache-lease",
            daemon=True,
        ).start()
        return Participant(mine)

    def leave(self) -> None:
        """Take part no longer; nothing waits for us any more."""
        if not self._is_here():
            return
        mine, self._mine = str(self._mine), None
        self._left.set()
        with self._database.write() as db:
            leases.end(db, mine)
            deletions.leave(db, mine)

    def deletions_to_confirm(self) -> list[Deletion]:
        """Deletions that wait for us, oldest first."""
        if not self._is_here():
            return []
        with self._database.read() as db:
            return deletions.to_confirm(db, str(self._mine))

    def confirm(self, deletion_id: int) -> None:
        """Neither this process nor its workers remember anything of it."""
        if not self._is_here():
            return
        with self._database.write() as db:
            deletions.confirm(db, deletion_id, str(self._mine))

    def is_asked(self) -> bool:
        """Whether no deletion was missed of which something may be remembered."""
        if not self._is_here():
            return True
        # In this order: if it is known because it has joined anew, that shows below.
        with self._database.read() as db:
            is_known = leases.is_known(db, str(self._mine))
        return is_known and not self._is_lost and self.missed() is None

    def missed(self) -> int | None:
        """A number, if all that is remembered is to be deleted."""
        num = self._num_returns
        return None if num == self._num_deleted else num

    def has_deleted_all(self, number: int) -> None:
        """All was deleted since `missed` answered this number."""
        self._num_deleted = number

    def delete_dead(self, deletion_id: int) -> None:
        """Nothing: those whose lease is over are not counted."""

    def delete_lost(self) -> None:
        """Delete who was away for too long, and what nobody needs, now and then."""
        if (now := time.monotonic()) < self._next_delete_lost:
            return
        self._next_delete_lost = now + DELETE_LOST_SECONDS
        with self._database.alone() as db:
            leases.delete_dead_turns(db)
            if not leases.lost(db):
                return
        with self._database.write() as db:
            for participant_id in leases.end_lost(db):
                deletions.leave(db, participant_id)

    def delete_all_dead(self) -> None:
        """Nothing: who was away for too long is deleted in time."""

    def num_alive(self) -> int:
        """How many other processes take part."""
        with self._database.read() as db:
            return len(leases.alive(db) - {self._mine})

    def standing(self) -> Standing:
        """How long deletions wait for us, and what there is to be done of them."""
        if not self._is_here():
            return Standing(seconds=0.0)
        found = leases.standing(self._database, str(self._mine))
        if found is None:  # lost: we join anew, and delete all
            return Standing(seconds=0.0)
        is_away = self._is_lost or self.missed() is not None
        return replace(found, seconds=0.0) if is_away else found

    def _keep(self, mine: str, left: threading.Event) -> None:
        """Renew the lease until we leave; a failure is tried again."""
        while not left.wait(leases.RENEW_SECONDS):
            try:
                with self._database.renewing() as db:
                    self._is_lost |= not leases.renew(db, mine)
                if self._is_lost:
                    self._return(mine, left)
            except StorageError as exc:
                self._log.warn_of("a lease", "A lease: %s", exc.log_text)

    def _return(self, mine: str, left: threading.Event) -> None:
        """Join anew; what others deleted before goes with all that is remembered."""
        with self._database.write() as db:
            if left.is_set():  # whose row goes, or went, in another transaction
                return
            if not leases.is_known(db, mine):  # or nobody told us of the last commit
                deletions.join(db, mine)
                deletions.ask_of_unfinished(db, mine)
                leases.take(db, mine, self._seconds)
        self._num_returns += 1
        self._is_lost = False
        logger.warning(
            "This API server was away for too long to know what was deleted meanwhile. "
            "It deletes all that it and its workers have in memory, and goes on."
        )

    def _is_here(self) -> bool:
        return self._mine is not None and self._process == os.getpid()
