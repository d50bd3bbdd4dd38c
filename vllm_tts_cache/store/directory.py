"""The files under ``SPEAKER_SAMPLES_DIR``: one directory per audio.

    store/ab/<audio_sha256>/audio.safetensors
    store/ab/<audio_sha256>/<encoder_fingerprint>.safetensors
    partial/<process>/      being written
    trash/<deletion>/       deleted, not yet removed

If the directory is the store, not a cache of a bucket, files are added to ``store`` and
removed from it only within write transactions of the catalogue (`place`, `remove`,
`discard`), so that no two processes do it at once. Locks, which end with their process,
show which processes are alive.
"""

import fcntl
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from weakref import WeakSet

from sqlalchemy import Connection

from vllm_tts_cache.audio.reference import AUDIO
from vllm_tts_cache.catalogue import schema
from vllm_tts_cache.catalogue.stored_files import StoredFile
from vllm_tts_cache.errors import EncodingCorruptError, StorageError
from vllm_tts_cache.files import (
    DIRECTORY_MODE,
    FILE_MODE,
    make_directory,
    storage_error,
    storage_errors,
    sync_directory,
    write_private,
)
from vllm_tts_cache.store.encoding import ADDRESS, EncodingKey, encoding_from_bytes

T = TypeVar("T")

SUFFIX = ".safetensors"
_NUM_ATTEMPTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Bytes that are written and have no row yet.

    Attributes:
        path: The file in a directory; None in a bucket.
        object_name: The object in a bucket; None in a directory.
    """

    data: bytes
    audio_sha256: str
    artifact: str
    path: Path | None = None
    object_name: str | None = None


class TakenAwayError(Exception):
    """The bytes were deleted, evicted or staged for too long; stage them anew."""


class StoreDirectory:
    """The files under ``SPEAKER_SAMPLES_DIR``; safe in any thread.

    Every method raises StorageError if the disk fails, and for an address or a
    fingerprint that is not 64 lower-case hex digits.
    """

    def __init__(self, root: Path):
        self.root = root
        self.store = root / "store"
        self.partial = root / "partial"
        self.trash = root / "trash"
        self._store = str(self.store)
        self._presence: Presence | None = None
        self._lock = threading.Lock()

    def audio_directory(self, audio_sha256: str) -> Path:
        """Return the directory of an audio and its encodings."""
        return Path(self.file_name(audio_sha256, AUDIO)).parent

    def file_name(self, audio_sha256: str, artifact: str) -> str:
        """Return the path of a file, whether it exists or not.

        A string, because making a ``Path`` takes as long as a call to the disk.
        """
        sha = audio_sha256
        for key in (sha, sha if artifact == AUDIO else artifact):
            # Keys arrive over RPC, and none may hold a path.
            if ADDRESS.fullmatch(key) is None:
                raise StorageError(f"Not a content address: {key[:80]!r}")
        return f"{self._store}/{sha[:2]}/{sha}/{artifact}{SUFFIX}"

    def exists(self, audio_sha256: str, artifact: str) -> bool:
        """Whether the file exists; one ``stat``, does not read it."""
        name = self.file_name(audio_sha256, artifact)
        try:
            os.stat(name)  # noqa: PTH116  a Path takes as long as the call
        except FileNotFoundError:
            return False
        except OSError as exc:
            raise storage_error(name, exc) from exc
        return True

    def has_any(self, audio_sha256: str) -> bool:
        """Whether the audio has a directory; one ``stat``."""
        directory = self.audio_directory(audio_sha256)
        with storage_errors(directory), suppress(FileNotFoundError):
            directory.stat()
            return True
        return False

    def read(self, audio_sha256: str, artifact: str) -> bytes | None:
        """Return the file's bytes, unverified; None if it is missing."""
        name = self.file_name(audio_sha256, artifact)
        # The bare calls: this is most of a disk hit, and a file object and a context
        # manager take as long as the kernel does.
        try:
            handle = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                num_bytes = os.fstat(handle).st_size
                # One byte more than the file has: a shorter read shows that it ends.
                data = os.read(handle, num_bytes + 1)
                if len(data) == num_bytes:
                    return data
                parts = [data]
                while parts[-1]:
                    parts.append(os.read(handle, 1 << 20))
                return b"".join(parts)
            finally:
                os.close(handle)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise storage_error(name, exc) from exc

    def stage(self, data: bytes, audio_sha256: str, artifact: str) -> Staged:
        """Write a file to ``partial``; the caller has to `place`, then `unstage` it.

        Raises: StorageFullError: No space is left; the partial file is removed.
        """
        try:
            with self._lock:
                mine = self._presence
                if mine is not None and not mine.path.exists():
                    mine.end()  # another program removed its directory
                if mine is None or not mine.is_here:
                    mine = self._presence = Presence(self.partial)
            path = write_private(mine.path, data)
        except OSError as exc:
            raise storage_error(self.partial, exc) from exc
        return Staged(
            data=data, audio_sha256=audio_sha256, artifact=artifact, path=path
        )

    def place(self, staged: Staged, _db: Connection | None = None) -> None:
        """Move a staged file to its name, durably; replaces a file there."""
        if staged.path is None:
            raise StorageError("staged in a bucket, placed in a directory")
        name = Path(self.file_name(staged.audio_sha256, staged.artifact))
        try:
            try:
                staged.path.replace(name)
            except FileNotFoundError:  # the first file of its audio
                make_directory(name.parent)
                staged.path.replace(name)
            sync_directory(name.parent)
        except OSError as exc:
            raise storage_error(name, exc) from exc

    def unstage(self, staged: Staged) -> None:
        """Remove a staged file unless it was placed; raises nothing.

        If that fails, `sweep_partials` removes it once this process has ended.
        """
        if staged.path is not None:
            with suppress(OSError):
                staged.path.unlink(missing_ok=True)

    def remove(self, audio_sha256: str, artifacts: Collection[str]) -> None:
        """Unlink files of an audio, and its directory when it is empty."""
        directory = self.audio_directory(audio_sha256)
        with storage_errors(directory):
            for artifact in artifacts:
                (directory / f"{artifact}{SUFFIX}").unlink(missing_ok=True)
            with suppress(OSError):
                directory.rmdir()

    def discard(self, audio_sha256: str, deletion_id: int) -> None:
        """Move all of an audio into the trash, durably, by one rename.

        Its name in the trash is random. After an error it may still be in ``store``.
        """
        directory = self.audio_directory(audio_sha256)
        trash = self.trash / str(deletion_id)
        with storage_errors(trash):
            if not directory.exists():
                return
            # Another process may remove the trash between the next two calls.
            for attempt in range(_NUM_ATTEMPTS):
                make_directory(trash)
                try:
                    directory.rename(trash / secrets.token_hex(8))
                except FileNotFoundError:
                    if attempt + 1 == _NUM_ATTEMPTS:
                        raise
                else:
                    break
            sync_directory(directory.parent)
            with suppress(FileNotFoundError):
                sync_directory(trash)

    def empty_trash(self, deletion_id: int | None = None) -> None:
        """Remove the trash of one deletion, or all of it."""
        trash = self.trash if deletion_id is None else self.trash / str(deletion_id)
        remove_tree(trash)

    def prefixes(self) -> list[str]:
        """Return the first two digits of all addresses, to walk ``store`` in parts."""
        return _names(self.store)

    def addresses(self, prefix: str) -> list[str]:
        """Return the addresses under a prefix that have a directory."""
        names = _names(self.store / prefix)
        return [n for n in names if ADDRESS.fullmatch(n) and n.startswith(prefix)]

    def artifacts(self, audio_sha256: str) -> set[str]:
        """Return which artifacts of an audio have files."""
        names = _names(self.audio_directory(audio_sha256))
        stems = {name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)}
        return {stem for stem in stems if stem == AUDIO or ADDRESS.fullmatch(stem)}

    def files(self, prefix: str) -> Iterator[tuple[str, str, os.stat_result]]:
        """Yield address, artifact and status of each file under a prefix."""
        for sha in self.addresses(prefix):
            for artifact in sorted(self.artifacts(sha)):
                path = Path(self.file_name(sha, artifact))
                with storage_errors(path), suppress(FileNotFoundError):
                    yield sha, artifact, path.stat()

    def misplaced(self, prefix: str) -> list[Path]:
        """Return paths under a prefix whose names no stored file has."""
        part = self.store / prefix
        addresses = self.addresses(prefix)
        found = [part / name for name in _names(part) if name not in addresses]
        for sha in addresses:
            allowed = {f"{artifact}{SUFFIX}" for artifact in self.artifacts(sha)}
            names = set(_names(part / sha)) - allowed
            found += [part / sha / name for name in sorted(names)]
        return found

    def sweep_partials(self) -> int:
        """Remove partial files of dead processes; return how many."""
        num_removed = 0
        for path in self._partials():
            with storage_errors(path):
                if (claimed := claim(path)) is None:
                    continue
                try:
                    num_removed += len(_names(path))
                    remove_tree(path)
                finally:
                    os.close(claimed)
        return num_removed

    def leftovers(self) -> list[Path]:
        """Return partial files of dead processes, and all entries of the trash."""
        found = [
            path / name
            for path in self._partials()
            if not is_alive(path)
            for name in _names(path)
        ]
        return found + [
            self.trash / name / entry
            for name in _names(self.trash)
            for entry in _names(self.trash / name)
        ]

    def close(self) -> None:
        """Release this process's part of ``partial``; `stage` takes another."""
        with self._lock:
            if self._presence is not None and self._presence.is_here:
                with suppress(OSError):
                    self._presence.path.rmdir()
                self._presence.end()
            self._presence = None

    def _partials(self) -> list[Path]:
        return [self.partial / name for name in _names(self.partial)]


def remove_tree(path: Path) -> None:
    """Remove a directory and all in it; other processes may do so at once.

    Raises: StorageError: Some files are left.
    """
    for _ in range(3):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
    with storage_errors(path), suppress(FileNotFoundError):
        shutil.rmtree(path)


def _names(path: Path) -> list[str]:
    with storage_errors(path), suppress(FileNotFoundError, NotADirectoryError):
        return sorted(os.listdir(path))  # noqa: PTH208  a Path each is what it costs
    return []


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
        with storage_errors(directory):
            make_directory(directory)
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
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, FILE_MODE))
        else:
            path.mkdir(mode=DIRECTORY_MODE)
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


class DirectoryReader:
    """Reads the files of a directory."""

    def __init__(self, directory: StoreDirectory):
        self._files = directory

    def has(self, file: StoredFile, *, is_read: bool = False) -> bool:
        """Whether a row's bytes are stored.

        With ``is_read`` they are read and verified. Else the file has to exist, and the
        last read must not have found it damaged.
        """
        if is_read:
            return is_whole(file, self._files.read(file.audio_sha256, file.artifact))
        is_there = self._files.exists(file.audio_sha256, file.artifact)
        return is_there and not file.is_suspect

    def read(
        self, key: EncodingKey, parse: Callable[[bytes, EncodingKey], T]
    ) -> T | None:
        """Return ``parse`` of a file's bytes; None if the file is missing.

        Raises: SourceCorruptError, EncodingCorruptError, as ``parse`` does.
        """
        blob = self._files.read(key.audio_sha256, key.encoder_fingerprint)
        return None if blob is None else parse(blob, key)

    read_here = read


class DirectoryOwner:
    """Stores and removes the files of a directory.

    Attributes:
        stage: Writes bytes without a row.
        place: Gives staged bytes their name, for a row that the caller writes next.
        unstage: Called for all that was staged, in the end.
    """

    def __init__(self, directory: StoreDirectory):
        self.files = directory
        self.stage, self.unstage = directory.stage, directory.unstage
        self.place = directory.place

    def remove(
        self, db: Connection, audio_sha256: str, artifacts: Collection[str]
    ) -> None:
        """Remove files whose rows this transaction deletes, or that have none."""
        schema.check_turn(db)
        self.files.remove(audio_sha256, artifacts)

    def discard(
        self, db: Connection, audio_sha256: str, keep: Collection[str], deletion_id: int
    ) -> None:
        """Remove all but the kept artifacts; if none, move the audio to the trash."""
        if not keep:
            schema.check_turn(db)
            self.files.discard(audio_sha256, deletion_id)
            return
        self.remove(db, audio_sha256, self.files.artifacts(audio_sha256) - set(keep))

    def finish_discard(self, audio_sha256: str | None, deletion_id: int) -> None:
        """Empty a deletion's trash. Raises: StorageError: Files are left."""
        del audio_sha256
        self.files.empty_trash(deletion_id)


def key_of(file: StoredFile) -> EncodingKey:
    """Return the key that a row's bytes carry."""
    return EncodingKey(
        audio_sha256=file.audio_sha256, encoder_fingerprint=file.artifact
    )


def is_whole(file: StoredFile, blob: bytes | None) -> bool:
    """Whether ``blob`` is the row's file, undamaged."""
    if blob is None:
        return False
    try:
        encoding_from_bytes(blob, key_of(file))
    except EncodingCorruptError:
        return False
    return True
