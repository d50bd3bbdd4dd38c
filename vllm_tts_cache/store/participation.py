"""An API process's part in deletions: who still remembers what."""

import os
from dataclasses import dataclass
from pathlib import Path

from vllm_tts_cache.catalogue import deletions
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.deletions import Deletion
from vllm_tts_cache.files import storage_errors
from vllm_tts_cache.store import locks
from vllm_tts_cache.store.locks import Presence

_SUFFIX = ".lock"


@dataclass(frozen=True, slots=True)
class Participant:
    """A process that is asked about every deletion until it leaves or dies."""

    id: str


class Participation:
    """This process among the participants; a forked child is none."""

    def __init__(self, root: Path, database: Database):
        self._directory = root / "participants"
        self._database = database
        self._presence: Presence | None = None

    def join(self) -> Participant:
        """Take part from now on: each deletion waits for `confirm`, while we live."""
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
        """Deletions whose files are gone and that wait for us, oldest first.

        Only then: what is dropped before could be read from the files again.
        """
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

    def drop_dead(self, deletion_id: int) -> None:
        """Wait no longer for those a deletion waits for that have died."""
        with self._database.read() as db:
            waited_for = deletions.waited_for(db, deletion_id)
        self._drop_dead(waited_for)

    def drop_all_dead(self) -> None:
        """Forget all participants that have died."""
        with self._database.read() as db:
            all_ = deletions.participants(db)
        self._drop_dead(all_)
        with storage_errors(self._directory):
            for path in self._directory.glob(f"*{_SUFFIX}"):
                if (claimed := locks.claim(path)) is not None:
                    path.unlink(missing_ok=True)
                    os.close(claimed)

    def _drop_dead(self, ids: list[str]) -> None:
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
