"""Locks that show which processes are alive: a lock ends with its process."""

import fcntl
import os
import secrets
from pathlib import Path
from weakref import WeakSet

from vllm_tts_cache import files


class Presence:
    """A locked path of a random name in a directory; shows that its process is alive.

    Args:
        directory: Made if missing.
        suffix: Of the name; the path is a file with one, a directory without.

    Attributes:
        is_here: Whether this process holds the lock; a forked child does not.

    Raises: StorageError: The path cannot be made.
    """

    def __init__(self, directory: Path, suffix: str = ""):
        self._handle = -1
        self.is_here = False
        with files.storage_errors(directory):
            files.make_directory(directory)
            while not self._taken(directory / f"{secrets.token_hex(8)}{suffix}"):
                pass
        _presences.add(self)

    def end(self) -> None:
        """Release the lock; the path stays until another process sweeps it."""
        if self.is_here:
            self.is_here = False
            os.close(self._handle)

    def _taken(self, path: Path) -> bool:
        if path.suffix:
            os.close(
                os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, files.FILE_MODE)
            )
        else:
            path.mkdir(mode=files.DIRECTORY_MODE)
        handle = claim(path)
        if handle is None:  # swept before it was locked
            return False
        self.path, self._handle, self.is_here = path, handle, True
        return True


def is_alive(path: Path) -> bool:
    """Whether a process holds the path's lock. Raises: OSError."""
    if (handle := claim(path)) is not None:
        os.close(handle)
        return False
    return path.exists()


def claim(path: Path) -> int | None:
    """Lock a path whose owner is dead; return the descriptor, None if it is alive.

    The caller sweeps the path before it closes the descriptor.

    Raises: OSError.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # What was swept between opening and locking is no longer at the path.
        if os.path.samestat(os.fstat(handle), path.stat()):
            return handle
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(handle)
        raise
    os.close(handle)
    return None


_presences: "WeakSet[Presence]" = WeakSet()


def _release_in_child() -> None:
    # The child shares the open files: with them it would make a dead parent look alive.
    for presence in list(_presences):
        presence.end()


os.register_at_fork(after_in_child=_release_in_child)
