"""One directory per audio: its paths, and all that is done to files in it.

    store/ab/<audio_sha256>/audio.safetensors
    store/ab/<audio_sha256>/<encoder_fingerprint>.safetensors
    partial/<process>/      being written
    trash/<deletion>/       deleted, not yet removed

Where the directory is the store and no cache of a bucket, files appear in and go from
``store`` within write transactions of the catalogue only (`place`, `remove`,
`discard`), so that no two processes do it at once.
"""

import os
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection

from vllm_tts_cache.catalogue import schema
from vllm_tts_cache.catalogue.records import AUDIO_KIND
from vllm_tts_cache.catalogue.stored_files import StoredFile
from vllm_tts_cache.errors import EncodingCorruptError, StorageError
from vllm_tts_cache.files import (
    make_directory,
    read_whole,
    storage_error,
    storage_errors,
    sync_directory,
    write_private,
)
from vllm_tts_cache.store import locks
from vllm_tts_cache.store.encoding import (
    ADDRESS,
    EncodingKey,
    encoding_from_bytes,
    is_address,
)
from vllm_tts_cache.store.locks import Presence

T = TypeVar("T")

SUFFIX = ".safetensors"
_NUM_ATTEMPTS = 5


class StoreDirectory:
    """The files under ``SPEAKER_SAMPLES_DIR``; safe in any thread.

    Every method raises StorageError where the disk fails, and for an address or a
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
        """Where all of one audio is."""
        sha = _checked(audio_sha256)
        return self.store / sha[:2] / sha

    def file_name(self, audio_sha256: str, kind: str) -> str:
        """Where a file is, or would be.

        A string, because making a ``Path`` takes as long as asking the disk.
        """
        sha = _checked(audio_sha256)
        if kind != AUDIO_KIND:
            _checked(kind)
        return f"{self._store}/{sha[:2]}/{sha}/{kind}{SUFFIX}"

    def exists(self, audio_sha256: str, kind: str) -> bool:
        """Whether the file is there; one look, and it is not read."""
        return _is_there(self.file_name(audio_sha256, kind))

    def has_any(self, audio_sha256: str) -> bool:
        """Whether the audio has a directory; one look."""
        return _is_there(str(self.audio_directory(audio_sha256)))

    def read(self, audio_sha256: str, kind: str) -> bytes | None:
        """The file's bytes, unverified; None if it is not there."""
        return read_whole(self.file_name(audio_sha256, kind))

    def stage(self, data: bytes) -> Path:
        """Write a file that is nobody's yet; `place` it, or unlink it.

        Raises: StorageFullError: There is no space left; nothing is left of it.
        """
        directory = self._own_partial()
        with storage_errors(directory):
            return write_private(directory, data)

    def place(self, staged: Path, audio_sha256: str, kind: str) -> None:
        """Move a staged file to its name, durably, over what is there."""
        name = Path(self.file_name(audio_sha256, kind))
        with storage_errors(name):
            make_directory(name.parent)
            staged.replace(name)
            sync_directory(name.parent)

    def remove(self, audio_sha256: str, kinds: Collection[str]) -> None:
        """Unlink files of an audio, and its directory when it is empty."""
        directory = self.audio_directory(audio_sha256)
        with storage_errors(directory):
            for kind in kinds:
                (directory / f"{kind}{SUFFIX}").unlink(missing_ok=True)
            with suppress(OSError):
                directory.rmdir()

    def remove_all(self, audio_sha256: str) -> None:
        """Remove every file of an audio, whatever it is called."""
        remove_tree(self.audio_directory(audio_sha256))

    def discard(self, audio_sha256: str, deletion_id: int) -> None:
        """Move all of an audio into the trash, durably, by one rename.

        Its name in the trash is random. After an error it may be where it was.
        """
        directory = self.audio_directory(audio_sha256)
        trash = self.trash / str(deletion_id)
        with storage_errors(trash):
            if not directory.exists():
                return
            # Another process may be emptying the trash, this directory of it included.
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
        """Remove what was moved there, for one deletion or for all."""
        trash = self.trash if deletion_id is None else self.trash / str(deletion_id)
        remove_tree(trash)

    def prefixes(self) -> list[str]:
        """Two hex digits each: the parts into which `store` can be walked."""
        return _names(self.store)

    def addresses(self, prefix: str) -> list[str]:
        """The audio that has a directory in one part."""
        names = _names(self.store / prefix)
        return [name for name in names if is_address(name) and name.startswith(prefix)]

    def kinds(self, audio_sha256: str) -> set[str]:
        """Which files of an audio are there."""
        names = _names(self.audio_directory(audio_sha256))
        kinds = {name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)}
        return {kind for kind in kinds if kind == AUDIO_KIND or is_address(kind)}

    def files(self, prefix: str) -> Iterator[tuple[str, str, os.stat_result]]:
        """Address, kind and status of each file in one part."""
        for sha in self.addresses(prefix):
            for kind in sorted(self.kinds(sha)):
                path = Path(self.file_name(sha, kind))
                with storage_errors(path), suppress(FileNotFoundError):
                    yield sha, kind, path.stat()

    def misplaced(self, prefix: str) -> list[Path]:
        """What is in one part and should not be, by its name."""
        part = self.store / prefix
        addresses = self.addresses(prefix)
        found = [part / name for name in _names(part) if name not in addresses]
        for sha in addresses:
            allowed = {f"{kind}{SUFFIX}" for kind in self.kinds(sha)}
            names = set(_names(part / sha)) - allowed
            found += [part / sha / name for name in sorted(names)]
        return found

    def sweep_partials(self) -> int:
        """Remove what dead processes were writing; return how many files."""
        num_removed = 0
        for path in self._partials():
            with storage_errors(path):
                if (claimed := locks.claim(path)) is None:
                    continue
                try:
                    num_removed += len(_names(path))
                    remove_tree(path)
                finally:
                    os.close(claimed)
        return num_removed

    def leftovers(self) -> list[Path]:
        """What dead processes were writing, and what is in the trash."""
        found = [
            path / name
            for path in self._partials()
            if not locks.is_alive(path)
            for name in _names(path)
        ]
        return found + [
            self.trash / name / entry
            for name in _names(self.trash)
            for entry in _names(self.trash / name)
        ]

    def close(self) -> None:
        """Let go of this process's place to write; the next write takes another."""
        with self._lock:
            if self._presence is not None and self._presence.is_here:
                with suppress(OSError):
                    self._presence.path.rmdir()
                self._presence.end()
            self._presence = None

    def _partials(self) -> list[Path]:
        return [self.partial / name for name in _names(self.partial)]

    def _own_partial(self) -> Path:
        with self._lock:
            if self._presence is None or not self._presence.is_here:
                self._presence = Presence(self.partial)
            return self._presence.path


def remove_tree(path: Path) -> None:
    """Remove a directory and all in it; others may be doing so as well.

    Raises: StorageError: Some of it is still there.
    """
    for _ in range(3):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
    with storage_errors(path), suppress(FileNotFoundError):
        shutil.rmtree(path)


def _is_there(name: str) -> bool:
    try:
        os.stat(name)  # noqa: PTH116  a Path takes as long as the call
    except FileNotFoundError:
        return False
    except OSError as exc:
        raise storage_error(name, exc) from exc
    return True


def _names(path: Path) -> list[str]:
    try:
        return sorted(os.listdir(path))  # noqa: PTH208  a Path each is what it costs
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as exc:
        raise StorageError(f"{path}: {exc.strerror or exc}") from exc


def _checked(text: str) -> str:
    """Return an address; keys arrive over RPC, and none may name a path of its own."""
    if ADDRESS.fullmatch(text) is None:
        raise StorageError(f"Not a content address: {text[:80]!r}")
    return text


class DirectoryReader:
    """Reads the files of a directory."""

    def __init__(self, directory: StoreDirectory):
        self._files = directory

    def has(self, file: StoredFile, *, is_read: bool = False) -> bool:
        """Whether a row's bytes are there.

        With ``is_read`` they are read and verified. Else one look tells, and what the
        row says of the last read.
        """
        if is_read:
            return is_whole(file, self._files.read(file.audio_sha256, file.kind))
        is_there = self._files.exists(file.audio_sha256, file.kind)
        return is_there and not file.is_suspect

    def read(
        self, audio_sha256: str, kind: str, parse: Callable[[bytes], T]
    ) -> T | None:
        """Return what a file's bytes mean to ``parse``; None if it is not there.

        Raises: SourceCorruptError, EncodingCorruptError, as ``parse`` does.
        """
        blob = self._files.read(audio_sha256, kind)
        return None if blob is None else parse(blob)

    read_here = read


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """Bytes that are written and have no row yet.

    Attributes:
        path: Where a directory has them; None in a bucket.
        object_name: Where a bucket has them; None in a directory.
    """

    data: bytes
    audio_sha256: str
    kind: str
    path: Path | None = None
    object_name: str | None = None


class TakenAwayError(Exception):
    """Staged bytes may not be placed any more: it took too long, or was deleted."""


class DirectoryOwner:
    """Stores and removes the files of a directory."""

    def __init__(self, directory: StoreDirectory):
        self.files = directory

    def stage(self, data: bytes, audio_sha256: str, kind: str) -> Staged:
        """Write bytes that have no row yet; `place` them, and `unstage` them after."""
        path = self.files.stage(data)
        return Staged(data=data, audio_sha256=audio_sha256, kind=kind, path=path)

    def place(self, db: Connection, staged: Staged) -> str | None:
        """Make staged bytes those of a row that is about to be written.

        Returns the name of the object for the row, None for a file.

        Raises: TakenAwayError: Stage them anew.
        """
        del db
        if staged.path is None:
            raise StorageError("staged in a bucket, placed in a directory")
        self.files.place(staged.path, staged.audio_sha256, staged.kind)
        return None

    def unstage(self, staged: Staged) -> None:
        """Remove what was staged and has no row; raises nothing.

        What stays is swept once this process has ended.
        """
        if staged.path is not None:
            with suppress(OSError):
                staged.path.unlink(missing_ok=True)

    def remove(self, db: Connection, audio_sha256: str, kinds: Collection[str]) -> None:
        """Remove files whose rows go in this transaction, or are not there."""
        schema.check_turn(db)
        self.files.remove(audio_sha256, kinds)

    def discard(
        self, db: Connection, audio_sha256: str, keep: Collection[str], deletion_id: int
    ) -> None:
        """Begin to remove an audio but for some kinds; `finish_discard` ends it."""
        if not keep:
            schema.check_turn(db)
            self.files.discard(audio_sha256, deletion_id)
            return
        self.remove(db, audio_sha256, self.files.kinds(audio_sha256) - set(keep))

    def finish_discard(self, audio_sha256: str | None, deletion_id: int) -> None:
        """End what was discarded. Raises: StorageError: Something is left."""
        del audio_sha256
        self.files.empty_trash(deletion_id)


def is_whole(file: StoredFile, blob: bytes | None) -> bool:
    """Whether bytes are there and are those that were written for a row."""
    if blob is None:
        return False
    key = EncodingKey(audio_sha256=file.audio_sha256, encoder_fingerprint=file.kind)
    try:
        encoding_from_bytes(blob, key)
    except EncodingCorruptError:
        return False
    return True
