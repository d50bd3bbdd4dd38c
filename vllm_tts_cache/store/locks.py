"""Locks among processes: that one lives, and whose turn a key is. They end with it.

Among the machines of a fleet a turn is a lease in the catalogue.
"""

import fcntl
import os
import secrets
import struct
import threading
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from weakref import WeakSet

from vllm_tts_cache.catalogue import leases
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.config import Settings
from vllm_tts_cache.errors import StorageError
from vllm_tts_cache.files import (
    DIRECTORY_MODE,
    FILE_MODE,
    make_directory,
    storage_errors,
)
from vllm_tts_cache.store.encoding import EncodingKey

# struct flock: l_type, l_whence, l_start, l_len, l_pid; a lock of the open file, not
# of the process, so that closing another descriptor of it does not release it.
_FLOCK = struct.Struct("hhqqi4x")
_KEY_BITS = 62
_FILE_NAME = "turns.lock"


class Presence:
    """A locked path of a random name in a directory.

    Args:
        directory: Made if missing.
        suffix: Of the name; the path is a file with one, a directory without.

    Attributes:
        is_here: Whether this process holds it; a forked child does not.

    Raises: StorageError: It cannot be made.
    """

    def __init__(self, directory: Path, suffix: str = ""):
        self._handle = -1
        self.is_here = False
        with storage_errors(directory):
            make_directory(directory)
            while not self._taken(directory / f"{secrets.token_hex(8)}{suffix}"):
                pass
        _presences.add(self)

    def end(self) -> None:
        """Let go of the lock; what is at the path is for others to sweep."""
        if self.is_here:
            self.is_here = False
            os.close(self._handle)

    def _taken(self, path: Path) -> bool:
        if path.suffix:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, FILE_MODE))
        else:
            path.mkdir(mode=DIRECTORY_MODE)
        handle = claim(path)
        if handle is None:  # swept before it was locked
            return False
        self.path, self._handle, self.is_here = path, handle, True
        return True


def is_alive(path: Path) -> bool:
    """Whether somebody holds the path. Raises: OSError."""
    if (handle := claim(path)) is not None:
        os.close(handle)
        return False
    return path.exists()


def claim(path: Path) -> int | None:
    """A descriptor that holds the lock of a path whose owner is dead; else None.

    Whoever sweeps the path does so before closing the descriptor.

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


class KeyTurns:
    """Turns by key among processes, each a locked byte of one file.

    They save work and are not needed for correctness: publishing an encoding twice is
    harmless. A turn ends with its process, however that ends.

    Args:
        path: The lock file; made if missing, and never grows.

    Attributes:
        look_again_seconds: After which another's turn is asked for again.
    """

    look_again_seconds = 0.1

    def __init__(self, path: Path):
        self._path = path
        self._handle = -1
        self._taken: set[int] = set()
        self._lock = threading.Lock()
        _turns.add(self)

    def try_take(self, key: EncodingKey) -> AbstractContextManager[None] | None:
        """The key's turn, until the context ends; None if another has it now.

        Never waits. Enter what is returned, or nobody gets the turn any more.

        Raises: StorageError: The lock file cannot be opened or locked.
        """
        byte = int(key.digest[:16], 16) % (1 << _KEY_BITS)
        with self._lock, storage_errors(self._path):
            # Threads share the open file, and with it the lock.
            if byte in self._taken or not self._set(fcntl.F_WRLCK, byte):
                return None
            self._taken.add(byte)
        return self._held(byte)

    def close(self) -> None:
        """Give every turn back."""
        with self._lock:
            if self._handle >= 0:
                os.close(self._handle)
            self._handle = -1
            self._taken.clear()

    @contextmanager
    def _held(self, byte: int) -> Generator[None, None, None]:
        try:
            yield
        finally:
            with self._lock:
                if byte in self._taken:
                    self._taken.remove(byte)
                    self._set(fcntl.F_UNLCK, byte)

    def _set(self, kind: int, byte: int) -> bool:
        if self._handle < 0:
            make_directory(self._path.parent)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._handle = os.open(self._path, flags, FILE_MODE)
        wanted = _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
        try:
            fcntl.fcntl(self._handle, fcntl.F_OFD_SETLK, wanted)
        except BlockingIOError:
            return False
        return True


_presences: "WeakSet[Presence]" = WeakSet()
_turns: "WeakSet[KeyTurns]" = WeakSet()


def _let_go_in_child() -> None:
    # The child shares the open files: it would keep its dead parent present, and hold
    # what that has taken.
    for presence in list(_presences):
        presence.end()
    for turns in list(_turns):
        turns._lock = threading.Lock()
        turns.close()


os.register_at_fork(after_in_child=_let_go_in_child)


class LeasedTurns:
    """As `locks.KeyTurns`, in a catalogue that several machines reach."""

    # Each look is two questions to a server, which a fleet asks.
    look_again_seconds = 0.5

    def __init__(self, database: Database):
        self._database = database

    def try_take(self, key: EncodingKey) -> AbstractContextManager[None] | None:
        """The key's turn, until the context ends; None if another has it now.

        Raises: StorageError: The catalogue cannot be asked.
        """
        holder = secrets.token_hex(8)  # of this turn: its next holder may be here, too
        with self._database.read() as db:
            if not leases.take_turn(db, key.digest, holder):
                return None
        return self._kept(key.digest, holder)

    @contextmanager
    def _kept(self, key_digest: str, holder: str) -> Generator[None, None, None]:
        try:
            yield
        finally:
            with suppress(StorageError), self._database.read() as db:
                leases.give_turn_back(db, key_digest, holder)


Turns = KeyTurns | LeasedTurns


def open_turns(settings: Settings, database: Database) -> Turns:
    """The turns of all processes that share a catalogue."""
    if database.backend.has_leases:
        return LeasedTurns(database)
    return KeyTurns(settings.samples_dir / _FILE_NAME)
