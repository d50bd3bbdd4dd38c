"""Files that a reader sees all of or nothing, private to their owner."""

import ctypes
import errno
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from vllm_tts_cache.errors import StorageError, StorageFullError

# Private names in a directory of somebody else's begin like this.
PARTIAL_PREFIX = ".partial-"

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700

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
    # A new directory lives in its parent, as a renamed file does.
    sync_directory(path.parent)


def publish(path: Path, data: bytes, *, prefix: str = PARTIAL_PREFIX) -> None:
    """Write ``data`` to ``path``: private name, same directory, fsync, rename.

    Raises:
        StorageFullError: No space is left; ``path`` is as it was.
        StorageError: Any other failure to write; ``path`` is as it was.
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
    """Write ``data`` to ``path`` unless it is there, whoever else does so now.

    Not by a rename: the first file stays, and is whole when it appears.

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
    """Write a new file of a random name, durably, for whoever renames it.

    Raises:
        OSError: It was not written, and nothing is left of it.
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
    """Make a rename in ``path`` durable; a rename lives in its directory."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_whole(name: str) -> bytes | None:
    """A file's bytes; None if it is not there.

    Raises:
        StorageError: It could not be read.
    """
    # The bare calls: this is most of a disk hit, and a file object and a context
    # manager take as long as the kernel does.
    try:
        handle = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _read_all(handle, os.fstat(handle).st_size)
        finally:
            os.close(handle)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise storage_error(name, exc) from exc


def shared_file_system(path: Path) -> str | None:
    """The kind of file system the path is on, if several hosts may share it."""
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


def _read_all(handle: int, num_bytes: int) -> bytes:
    # One byte more than there should be: a read that falls short has met the end.
    data = os.read(handle, num_bytes + 1)
    if len(data) == num_bytes:
        return data
    parts = [data]
    while parts[-1]:
        parts.append(os.read(handle, 1 << 20))
    return b"".join(parts)
