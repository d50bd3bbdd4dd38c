"""Locks that say that a process lives: they end with it, however it ends."""

import fcntl
import os
import secrets
from pathlib import Path
from weakref import WeakSet

from vllm_tts_cache.files import (
    DIRECTORY_MODE,
    FILE_MODE,
    make_directory,
    storage_errors,
)


class Presence:
    """A locked path of a random name in a directory.

    Args:
        directory: Made if missing.
        suffix: Of the name; the path is a file with one, a directory without.

    Raises:
        StorageError: It cannot be made.
    """

    def __init__(self, directory: Path, suffix: str = ""):
        self._handle = -1
        with storage_errors(directory):
            make_directory(directory)
            while not self._taken(directory / f"{secrets.token_hex(8)}{suffix}"):
                pass
        _presences.add(self)

    @property
    def is_here(self) -> bool:
        """Whether this process holds it; a forked child does not."""
        return self._handle >= 0

    def end(self) -> None:
        """Let go of the lock; what is at the path is for others to sweep."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _taken(self, path: Path) -> bool:
        if path.suffix:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, FILE_MODE))
        else:
            path.mkdir(mode=DIRECTORY_MODE)
        handle = _locked(path)
        if handle is None:  # swept before it was locked
            return False
        self.path, self._handle = path, handle
        return True


def claim(path: Path) -> int | None:
    """A descriptor that holds the lock of a path whose owner is dead; else None.

    Whoever sweeps the path does so before closing the descriptor.

    Raises: OSError.
    """
    return _locked(path)


def is_alive(path: Path) -> bool:
    """Whether somebody holds the path.

    Raises: OSError.
    """
    if (handle := _locked(path)) is not None:
        os.close(handle)
        return False
    return path.exists()


def _locked(path: Path) -> int | None:
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


def _end_in_child() -> None:
    # A child that holds the descriptor would keep its dead parent present.
    for presence in list(_presences):
        presence.end()


os.register_at_fork(after_in_child=_end_in_child)
