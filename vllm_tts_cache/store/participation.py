"""An API process's part in deletions: who still remembers what."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vllm_tts_cache.catalogue import deletions
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.deletions import Deletion
from vllm_tts_cache.files import storage_errors
from vllm_tts_cache.store import locks
from vllm_tts_cache.store.locks import Presence

_FOLDER, _SUFFIX = "participants", ".lock"


@dataclass(frozen=True, slots=True)
class Participant:
    """A process that is asked about every deletion until it leaves or dies."""

    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """Which of the rows that a process remembers are not true any more.

    Attributes:
        change: The last one that it tells of; `Participation.hear` is called with it.
        speaker_ids: Whose rows changed; None: delete all.
        seconds: How long the others are good for, from before it was asked for: no row
            changes in that time without waiting for this process.
        is_asked: Whether there may be deletions to confirm.
        is_left: Whether there may be deletions whose files are not all removed.
        has_expired: Whether the end of some speaker may have come.
    """

    change: int
    speaker_ids: list[str] | None
    seconds: float
    is_asked: bool = True
    is_left: bool = True
    has_expired: bool = True


class Participation(Protocol):
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

    def news(self) -> News:
        """Which speakers changed since what `hear` was called with last.

        Raises: StorageError.
        """
        ...

    def hear(self, change: int) -> None:
        """Nothing is remembered here of rows that changed, up to this change."""
        ...

    def num_unheard(self, change: int) -> int:
        """How many that are waited for have not heard of a change yet."""
        ...


def is_in_use(root: Path) -> bool:
    """Whether a server of this machine is at work on the directory.

    Raises: StorageError.
    """
    with storage_errors(root):
        return any(map(locks.is_alive, (root / _FOLDER).glob(f"*{_SUFFIX}")))


class LockedParticipation:
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

    def news(self) -> News:
        """Nothing, and no row is to be remembered: reading one costs microseconds."""
        return News(change=0, speaker_ids=[], seconds=0.0)

    def hear(self, change: int) -> None:
        """Nothing."""

    def num_unheard(self, change: int) -> int:  # noqa: ARG002
        """Nobody."""
        return 0

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
