"""Writing files so that a reader sees all of one or nothing."""

import errno
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from vllm_tts_cache.errors import StorageError, StorageFullError

# Every private name starts like this, so that a sweep can tell a half-written
# file that a killed process left behind from everything else.
PARTIAL_PREFIX = ".partial-"

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def publish(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``: private name, same directory, fsync, rename.

    Raises:
        StorageFullError: No space is left; ``path`` is as it was.
        StorageError: Any other failure to write; ``path`` is as it was.
    """
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=PARTIAL_PREFIX)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(partial).replace(path)
        finally:
            Path(partial).unlink(missing_ok=True)
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make a rename in ``path`` durable; a rename lives in its directory."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
        return StorageFullError(str(path))
    return StorageError(f"{path}: {error.strerror or error}")
