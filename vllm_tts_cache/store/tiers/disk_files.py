"""The system calls of the disk tier, in directories that others empty meanwhile."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from vllm_tts_cache.errors import StorageError
from vllm_tts_cache.files import publish, storage_error, storage_errors

# A directory can vanish between its creation and the first file in it, because
# whoever empties one removes it. Several that forget one audio over and over make
# a writer lose about every second attempt.
NUM_ATTEMPTS = 20


def read(name: str) -> tuple[bytes, float] | None:
    """Return a file's bytes and modification time; None if it is not there.

    Raises:
        StorageError: It could not be read.
    """
    # The bare calls: this is most of a disk hit, and a file object and a context
    # manager take as long as the kernel does.
    try:
        handle = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(handle)
            return _read_all(handle, status.st_size), status.st_mtime
        finally:
            os.close(handle)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise storage_error(name, exc) from exc


def look(name: str) -> os.stat_result | None:
    """Return a file's status; None if nothing is there.

    Raises:
        StorageError: The directory could not be asked.
    """
    try:
        return os.stat(name)  # noqa: PTH116  a Path takes as long as the call
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise storage_error(name, exc) from exc


def touch(name: str | Path, now: float) -> None:
    """Set the modification time, if that is possible."""
    with suppress(OSError):  # evicted meanwhile, or a read-only file system
        os.utime(name, (now, now))


def publish_retrying(path: Path, blob: bytes) -> None:
    """Publish into a directory that may vanish meanwhile.

    Raises:
        StorageError: It was not written; an empty directory is not left behind.
    """
    for attempt in range(1, NUM_ATTEMPTS + 1):
        try:
            publish(path, blob)
        except StorageError as exc:
            vanished = isinstance(exc.__cause__, FileNotFoundError | FileExistsError)
            if not vanished or attempt == NUM_ATTEMPTS:
                remove_empty(path.parent)
                raise
        else:
            return


def rename_retrying(source: Path, target: Path) -> bool:
    """Rename into a directory that may vanish meanwhile; False if the source did.

    Raises:
        OSError: It stays where it was.
    """
    for attempt in range(1, NUM_ATTEMPTS + 1):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            source.replace(target)
        except (FileNotFoundError, FileExistsError):
            if not source.exists():
                remove_empty(target.parent)
                return False
            if attempt == NUM_ATTEMPTS:
                raise
        else:
            return True
    return False


def children(directory: Path) -> list[Path]:
    """Return what a directory holds, sorted; nothing if it is not there.

    Raises:
        StorageError: It could not be read.
    """
    with storage_errors(directory):
        try:
            return sorted(directory.iterdir())
        except FileNotFoundError:
            return []


def walk(directory: Path) -> Iterator[Path]:
    """Yield every file below a directory, including ones that are not ours.

    Raises:
        OSError: A directory could not be read. One that vanished is not an error.
    """
    for parent, _, names in os.walk(directory, onerror=_raise_unless_gone):
        for name in names:
            yield Path(parent, name)


def remove(path: Path) -> int | None:
    """Remove one file; return the bytes freed, or None if it was gone.

    Raises:
        OSError: It is still there.
    """
    try:
        num_bytes = path.lstat().st_size
        path.unlink()
    except FileNotFoundError:
        return None
    return num_bytes


def remove_empty(directory: Path) -> bool:
    """Remove a directory if nothing is in it; False if something is."""
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def remove_tree(directory: Path) -> None:
    """Remove a directory and all that is in it; others may do so as well.

    Raises:
        OSError: Some of it is still there.
    """
    for parent, _, names in os.walk(
        directory, topdown=False, onerror=_raise_unless_gone
    ):
        for name in names:
            Path(parent, name).unlink(missing_ok=True)
        # Not a directory: a link to one. Its files are gone, which is what counts.
        with suppress(FileNotFoundError, NotADirectoryError):
            Path(parent).rmdir()


def _read_all(handle: int, num_bytes: int) -> bytes:
    # One byte more than there should be: a read that falls short has met the end.
    data = os.read(handle, num_bytes + 1)
    if len(data) == num_bytes:
        return data
    parts = [data]
    while parts[-1]:
        parts.append(os.read(handle, 1 << 20))
    return b"".join(parts)


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
