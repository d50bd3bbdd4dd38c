"""The API processes that confirm deletions, and this one's part among them.

Locks of files tell who lives where all are on one machine, else leases do.
"""

import logging
import os
import secrets
import threading
import time
from dataclasses import replace
from pathlib import Path

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


class _Participants:
    """All processes that confirm deletions; this one from `join` to `leave`.

    A forked child is none of them.
    """

    def __init__(self, database: Database):
        self._database = database
        self._mine: str | None = None
        self._process = 0
        self._num_returns = 0  # after absences in which deletions were missed
        self._num_deleted = 0  # of them, those after which all was deleted

    @property
    def id(self) -> str | None:
        """This process's id; None unless it takes part."""
        return self._mine if self._process == os.getpid() else None

    def deletions_to_confirm(self) -> list[Deletion]:
        """Deletions whose files are gone and that wait for us, oldest first.

        Only then: what is deleted before could be read from the files again.
        """
        if (mine := self.id) is None:
            return []
        with self._database.read() as db:
            return deletions.to_confirm(db, mine)

    def confirm(self, deletion_id: int) -> None:
        """Write down that this process and its workers remember nothing of it."""
        if (mine := self.id) is None:
            return
        with self._database.write() as db:
            deletions.confirm(db, deletion_id, mine)
        self._database.backend.wipe_log()

    def missed(self) -> int | None:
        """A number, if all that is remembered is to be deleted: `has_deleted_all`.

        We were away for so long that what was deleted meanwhile is not known any more,
        and are asked about deletions again.
        """
        num = self._num_returns
        return None if num == self._num_deleted else num

    def has_deleted_all(self, number: int) -> None:
        """All was deleted, here and by workers, since `missed` answered this number."""
        self._num_deleted = number

    def is_asked(self) -> bool:
        """Whether no deletion was missed of which something may be remembered.

        Else none is finished, whatever the catalogue says.
        """
        return self._num_returns == self._num_deleted

    def standing(self) -> Standing:
        """For how long deletions wait for us, and what there is to be done of them.

        Without a lease that is not known: 0 seconds. Raises: StorageError.
        """
        return Standing(seconds=0.0)


class LockedParticipants(_Participants):
    """Processes of one machine, each of which holds a file's lock while it lives."""

    def __init__(self, root: Path, database: Database):
        super().__init__(database)
        self._directory = root / _FOLDER
        self._presence: Presence | None = None

    def join(self) -> str:
        """Have each deletion wait for `confirm`, while we live; return our id."""
        if (mine := self.id) is not None:
            return mine
        # Locked before it is known, or somebody would take it for dead.
        present = Presence(self._directory, _SUFFIX)
        with self._database.write() as db:
            deletions.join(db, present.path.stem)
        self._presence = present
        self._mine, self._process = present.path.stem, os.getpid()
        return present.path.stem

    def leave(self) -> None:
        """End what `join` began; deletions do not wait for us any more."""
        if (mine := self.id) is None or self._presence is None:
            return
        with self._database.write() as db:
            deletions.leave(db, mine)
        self._database.backend.wipe_log()
        self._presence.path.unlink(missing_ok=True)
        self._presence.end()
        self._presence = self._mine = None

    def delete_dead(self) -> None:
        """Delete participants whose lock is free, and locks of those that are gone."""
        with self._database.read() as db:
            all_ = deletions.participants(db)
        with storage_errors(self._directory):
            dead = [id_ for id_ in all_ if not self._is_alive(id_)]
        if dead:
            with self._database.write() as db:
                for id_ in dead:
                    deletions.leave(db, id_)
            self._database.backend.wipe_log()
        with storage_errors(self._directory):
            for path in self._directory.glob(f"*{_SUFFIX}"):
                if (claimed := locks.claim(path)) is not None:
                    path.unlink(missing_ok=True)
                    os.close(claimed)

    def num_alive(self) -> int:
        """How many other processes take part."""
        with self._database.read() as db:
            others = set(deletions.participants(db)) - {self.id}
        with storage_errors(self._directory):
            return sum(map(self._is_alive, others))

    def _is_alive(self, id_: str) -> bool:
        return locks.is_alive(self._directory / f"{id_}{_SUFFIX}")


class LeasedParticipants(_Participants):
    """Processes of any machine, which are waited for while they renew their leases.

    Each on a thread of its own: a process that is busy, and confirms late, is alive.

    One that was away for so long that it was deleted joins anew by itself, and then
    has everything deleted that it remembers: what it missed, nobody knows. Until then
    it may speak what it finds by rows that it reads in the catalogue, which knows of no
    deleted voice. What it may not do is to say that a deletion is finished.

    Args:
        seconds: For how long a process that does not renew is waited for.
    """

    def __init__(self, database: Database, seconds: float):
        super().__init__(database)
        self._seconds = seconds
        self._left = threading.Event()
        self._is_lost = False
        self._next_delete_dead = 0.0
        self._log = ThrottledLog(logger)

    def join(self) -> str:
        """Have each deletion wait for `confirm`, while we live; return our id."""
        if (known := self.id) is not None:
            return known
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
        return mine

    def leave(self) -> None:
        """End what `join` began; deletions do not wait for us any more."""
        if (mine := self.id) is None:
            return
        self._mine = None
        self._left.set()
        with self._database.write() as db:
            leases.end(db, mine)
            deletions.leave(db, mine)

    def is_asked(self) -> bool:
        """Whether no deletion was missed of which something may be remembered."""
        if (mine := self.id) is None:
            return True
        # In this order: if it is known because it has joined anew, that shows below.
        with self._database.read() as db:
            is_known = leases.is_known(db, mine)
        return is_known and not self._is_lost and super().is_asked()

    def delete_dead(self) -> None:
        """Delete participants that were away for too long, and turns; now and then.

        Before that those whose lease is over are not waited for.
        """
        if (now := time.monotonic()) < self._next_delete_dead:
            return
        self._next_delete_dead = now + DELETE_LOST_SECONDS
        with self._database.read() as db:
            leases.delete_dead_turns(db)
            if not leases.lost(db):
                return
        with self._database.write() as db:
            for participant_id in leases.end_lost(db):
                deletions.leave(db, participant_id)

    def num_alive(self) -> int:
        """How many other processes take part."""
        with self._database.read() as db:
            return len(leases.alive(db) - {self._mine})

    def standing(self) -> Standing:
        """For how long deletions wait for us, and what there is to be done of them."""
        if (mine := self.id) is None:
            return Standing(seconds=0.0)
        found = leases.standing(self._database, mine)
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


Participants = LockedParticipants | LeasedParticipants
