"""An API process's part in deletions where several machines reach the catalogue."""

import logging
import os
import secrets
import threading
import time

from vllm_tts_cache.catalogue import (
    changed_speakers,
    deletions,
    encode_turns,
    leases,
)
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.deletions import Deletion
from vllm_tts_cache.errors import StorageError
from vllm_tts_cache.store.participation import News, Participant
from vllm_tts_cache.throttled_log import ThrottledLog

logger = logging.getLogger("vllm.vllm_tts_cache")

DELETE_LOST_SECONDS = 600.0


class LeasedParticipation:
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
            if (heard := leases.heard_by_all(db)) is not None:
                changed_speakers.delete(db, heard)
            encode_turns.delete_dead(db)
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

    def news(self) -> News:
        """Which speakers changed, and for how long we are waited for."""
        if not self._is_here():
            return News(change=0, speaker_ids=[], seconds=0.0)
        standing = leases.standing(self._database, str(self._mine))
        if standing is None:  # lost: we join anew, and delete all
            return News(change=0, speaker_ids=[], seconds=0.0)
        change, changed = standing.newest, list[str]()
        if change != standing.heard:
            with self._database.read() as db:
                change, changed = changed_speakers.since(db, standing.heard)
        is_away = self._is_lost or self.missed() is not None
        is_too_much = len(changed) > changed_speakers.MAX_TOLD
        return News(
            change=change,
            speaker_ids=None if is_too_much else changed,
            seconds=0.0 if is_away else standing.seconds,
            is_asked=standing.is_asked,
            is_left=standing.is_left,
            has_expired=standing.has_expired,
        )

    def hear(self, change: int) -> None:
        """Nothing is remembered here of rows that changed, up to this change."""
        if self._is_here():
            with self._database.renewing() as db:
                leases.hear(db, str(self._mine), change)

    def num_unheard(self, change: int) -> int:
        """How many that are waited for have not heard of it."""
        with self._database.read() as db:
            return leases.num_awaited(db, change)

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
