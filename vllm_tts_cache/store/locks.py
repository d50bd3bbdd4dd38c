"""Locks that show which processes are alive, and which one has the turn of a key.

A lock ends with its process. In a fleet a turn is a lease in the catalogue instead.
"""

import fcntl
import os
import secrets
import struct
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from weakref import WeakSet

from vllm_tts_cache import files
from vllm_tts_cache.catalogue import leases
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.config import Settings
from vllm_tts_cache.errors import StorageError
from vllm_tts_cache.store.encoding import EncodingKey

# struct flock: l_type, l_whence, l_start, l_len, l_pid; a lock of the open file, not
# of the process, so that closing another descriptor of it does not release it.
_FLOCK = struct.Struct("hhqqi4x")
_KEY_BITS = 62
_FILE_NAME = "turns.lock"


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


class KeyTurns:
    """Turns by key among processes, each a locked byte of one file.

    They save work and are not needed for correctness: publishing an encoding twice is
    harmless. A turn ends with its process, however that ends.

    Args:
        path: The lock file; made if missing, and never grows.

    Attributes:
        look_again_seconds: How long to wait before `turn` is asked for again.
    """

    look_again_seconds = 0.1

    def __init__(self, path: Path):
        self._path = path
        self._handle = -1
        self._taken: set[int] = set()
        self._lock = threading.Lock()
        _turns.add(self)

    @contextmanager
    def turn(self, key: EncodingKey) -> Generator[bool, None, None]:
        """Hold the key's turn in the block; yields False if another one has it.

        Never waits. Where the file cannot be locked, each caller has the turn.
        """
        # Both parts are hashes already.
        number = int(key.audio_sha256[:16], 16) ^ int(key.encoder_fingerprint[:16], 16)
        byte = number % (1 << _KEY_BITS)
        with self._lock:
            # Threads share the open file, and with it the lock.
            is_mine = byte not in self._taken and self._take(byte)
            if is_mine:
                self._taken.add(byte)
        try:
            yield is_mine
        finally:
            with self._lock:
                if is_mine and byte in self._taken:  # `close` has released it, too
                    self._taken.remove(byte)
                    with suppress(OSError, ValueError):  # it could not be opened
                        released = _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0)
                        fcntl.fcntl(self._handle, fcntl.F_OFD_SETLK, released)

    def close(self) -> None:
        """Release every turn."""
        with self._lock:
            if self._handle >= 0:
                os.close(self._handle)
            self._handle = -1
            self._taken.clear()

    def _take(self, byte: int) -> bool:
        wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        try:
            if self._handle < 0:
                files.make_directory(self._path.parent)
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                self._handle = os.open(self._path, flags, files.FILE_MODE)
            fcntl.fcntl(self._handle, fcntl.F_OFD_SETLK, wanted)
        except BlockingIOError:
            return False
        except OSError:
            pass  # turns save work; nothing depends on them
        return True


_presences: "WeakSet[Presence]" = WeakSet()
_turns: "WeakSet[KeyTurns]" = WeakSet()


def _release_in_child() -> None:
    # The child shares the open files: with them it would make a dead parent look alive,
    # and hold its turns.
    for presence in list(_presences):
        presence.end()
    for turns in list(_turns):
        turns._lock = threading.Lock()
        turns.close()


os.register_at_fork(after_in_child=_release_in_child)


class LeasedTurns:
    """Turns as of `KeyTurns` among several machines: leases in their catalogue."""

    # Each attempt is two queries to a server that a whole fleet uses.
    look_again_seconds = 0.5

    def __init__(self, database: Database):
        self._database = database

    @contextmanager
    def turn(self, key: EncodingKey) -> Generator[bool, None, None]:
        """Hold the key's turn in the block; yields False if another one has it.

        While the catalogue fails, each caller has the turn.
        """
        holder = secrets.token_hex(8)  # this process may take the next turn
        is_mine = True
        with suppress(StorageError), self._database.read() as db:
            is_mine = leases.take_turn(db, key.digest, holder)
        try:
            yield is_mine
        finally:
            if is_mine:
                with suppress(StorageError), self._database.read() as db:
                    leases.give_turn_back(db, key.digest, holder)


Turns = KeyTurns | LeasedTurns


def open_turns(settings: Settings, database: Database) -> Turns:
    """Return the turns that all processes of a catalogue share."""
    if database.backend.has_leases:
        return LeasedTurns(database)
    return KeyTurns(settings.samples_dir / _FILE_NAME)
