"""Writes files that a reader sees whole or not at all, private to their owner."""

import ctypes
import errno
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from vllm_tts_cache.errors import StorageError, StorageFullError

# Begins the names of unfinished files in a directory that is not ours.
PARTIAL_PREFIX = ".partial-"

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700

# A file that is truncated on a full disk, so that deletions have space: SQLite's log
# needs 190 KB to delete one voice of 60,000 that have long texts and many labels, and
# 2.8 MB for 32 that expire together.
BALLAST = "ballast"
BALLAST_BYTES = 4 << 20
_LEAST_BALLAST_BYTES = 64 << 10

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# statfs numbers of file systems that several hosts may share (linux/magic.h).
_SHARED_FILE_SYSTEMS = {
    0x6969: "NFS",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB",
    0x517B: "SMB",
    0x00C36400: "Ceph",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x65735546: "FUSE",
}


def make_directory(path: Path) -> None:
    """Make a directory and its parents, for their owner only, and durably.

    Raises: OSError.
    """
    if path.is_dir():
        return
    make_directory(path.parent)
    with suppress(FileExistsError):
        path.mkdir(mode=DIRECTORY_MODE)
    # The parent directory stores the new name, as it does after a rename.
    sync_directory(path.parent)


def publish(path: Path, data: bytes, *, prefix: str = PARTIAL_PREFIX) -> None:
    """Write ``data`` to ``path``: private name, same directory, fsync, rename.

    Raises:
        StorageFullError: No space is left; ``path`` is as it was.
        StorageError: Another failure; ``path`` is as it was, or has all of ``data``.
    """
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = write_private(path.parent, data, prefix)
        try:
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        sync_directory(path.parent)


def publish_once(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` unless the file exists; safe beside other processes.

    By a hard link, not a rename: the first file stays, and is whole when it appears.

    Raises: OSError.
    """
    if path.exists():
        return
    written = write_private(path.parent, data, PARTIAL_PREFIX)
    try:
        with suppress(FileExistsError):
            path.hardlink_to(written)
        sync_directory(path.parent)
    finally:
        written.unlink(missing_ok=True)


def write_private(directory: Path, data: bytes, prefix: str = "") -> Path:
    """Write a new file of a random name, durably; the caller renames or unlinks it.

    Raises: OSError: It was not written, and the partial file is removed.
    """
    handle, name = tempfile.mkstemp(dir=directory, prefix=prefix)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return Path(name)


def sync_directory(path: Path) -> None:
    """Make a rename in the directory ``path`` durable: the directory stores it."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fill_ballast(directory: Path) -> None:
    """Fill a directory's ballast up, if at least as much stays free beside it.

    An OSError is ignored: a ballast that is filled in part is of use as well.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    with suppress(OSError):
        handle = os.open(directory / BALLAST, flags, FILE_MODE)
        with os.fdopen(handle, "ab") as file:
            missing = BALLAST_BYTES - file.tell()
            if 0 < missing < free_bytes(directory) - BALLAST_BYTES:
                # A file system that compresses would store zeros in no space.
                file.write(os.urandom(missing))
                file.flush()
                os.fsync(handle)


def give_up_ballast(directory: Path) -> bool:
    """Free half of a directory's ballast; False if none is left.

    Not all of it: other requests may fill what is freed, and the next deletion needs
    space as well. Raises: StorageError.
    """
    path = directory / BALLAST
    with storage_errors(path):
        num_bytes = path.stat().st_size if path.exists() else 0
        is_last = num_bytes <= _LEAST_BALLAST_BYTES
        if num_bytes:
            os.truncate(path, 0 if is_last else num_bytes // 2)
    return num_bytes > 0


def free_bytes(path: Path) -> int:
    """Return how many bytes the path's file system has for us. Raises: OSError."""
    file_system = os.statvfs(path)
    return file_system.f_bavail * file_system.f_frsize


def shared_file_system(path: Path) -> str | None:
    """The name of the path's file system if several hosts may share it, else None."""
    # struct statfs begins with f_type, a long, and is shorter than this.
    buffer = ctypes.create_string_buffer(512)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(path), buffer) != 0:
        return None
    number = ctypes.c_ulong.from_buffer(buffer).value & 0xFFFFFFFF
    return _SHARED_FILE_SYSTEMS.get(number)


@contextmanager
def storage_errors(path: Path) -> Generator[None, None, None]:
    """Turn an ``OSError`` inside the block into the storage error it means."""
    try:
        yield
    except OSError as exc:
        raise storage_error(path, exc) from exc


def storage_error(path: Path | str, error: OSError) -> StorageError:
    """The storage error that an ``OSError`` at ``path`` means."""
    if error.errno in _FULL:
        return StorageFullError()
    return StorageError(f"{path}: {error.strerror or error}")
