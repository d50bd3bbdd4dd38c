"""One directory per audio: its paths, and all that is done to files in it.

    store/ab/<audio_sha256>/audio.safetensors
    store/ab/<audio_sha256>/<encoder_fingerprint>.safetensors
    partial/<process>/      being written
    quarantine/<audio_sha256>/   files whose bytes were wrong
    trash/<deletion>/       deleted, not yet removed

Files appear in and go from ``store`` within write transactions of the catalogue only
(`place`, `remove`, `discard`), so that no two processes do it at once. All who use the
directory have it: files are the truth.
"""

import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection

from vllm_tts_cache.catalogue import deletions, owners, schema, stored_files
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.records import AUDIO_KIND, Segment
from vllm_tts_cache.catalogue.stored_files import StoredFile
from vllm_tts_cache.errors import (
    EncodingCorruptError,
    SourceCorruptError,
    StorageError,
)
from vllm_tts_cache.files import (
    make_directory,
    read_whole,
    storage_error,
    storage_errors,
    sync_directory,
    write_private,
)
from vllm_tts_cache.store import audio_file, binding, locks
from vllm_tts_cache.store.audio_file import named
from vllm_tts_cache.store.binding import StoreId, store_id_of
from vllm_tts_cache.store.blobs import Staged
from vllm_tts_cache.store.encoding import ADDRESS, is_address
from vllm_tts_cache.store.locks import Presence

SUFFIX = ".safetensors"
_NUM_ATTEMPTS = 5

T = TypeVar("T")

# What differs is looked at again so much later: somebody may be about to commit.
_SETTLE_SECONDS = 0.3


class StoreDirectory:
    """The files under ``SPEAKER_SAMPLES_DIR``; safe in any thread."""

    def __init__(self, root: Path):
        self.root = root
        self.store = root / "store"
        self.partial = root / "partial"
        self.quarantine = root / "quarantine"
        self.trash = root / "trash"
        self._store = str(self.store)
        self._presence: Presence | None = None
        self._lock = threading.Lock()

    def audio_directory(self, audio_sha256: str) -> Path:
        """Where all of one audio is.

        Raises:
            StorageError: Not 64 lower-case hex digits.
        """
        sha = _checked(audio_sha256)
        return self.store / sha[:2] / sha

    def file_name(self, audio_sha256: str, kind: str) -> str:
        """Where a file is, or would be.

        A string, because making a ``Path`` takes as long as asking the disk.

        Raises:
            StorageError: A part is not 64 lower-case hex digits.
        """
        sha = _checked(audio_sha256)
        if kind != AUDIO_KIND:
            _checked(kind)
        return f"{self._store}/{sha[:2]}/{sha}/{kind}{SUFFIX}"

    def exists(self, audio_sha256: str, kind: str) -> bool:
        """Whether the file is there; one look, and it is not read.

        Raises: StorageError.
        """
        return _is_there(self.file_name(audio_sha256, kind))

    def has_any(self, audio_sha256: str) -> bool:
        """Whether anything of an audio is there, or was set aside; two looks.

        Raises: StorageError.
        """
        return any(
            _is_there(str(path))
            for path in (
                self.audio_directory(audio_sha256),
                self.quarantine / audio_sha256,
            )
        )

    def num_bytes(self, audio_sha256: str, kind: str) -> int | None:
        """Length of the file; None if it is not there.

        Raises: StorageError.
        """
        path = Path(self.file_name(audio_sha256, kind))
        with storage_errors(path), suppress(FileNotFoundError):
            return path.stat().st_size
        return None

    def read(self, audio_sha256: str, kind: str) -> bytes | None:
        """The file's bytes, unverified; None if it is not there.

        Raises: StorageError.
        """
        return read_whole(self.file_name(audio_sha256, kind))

    def stage(self, data: bytes) -> Path:
        """Write a file that is nobody's yet; `place` it, or unlink it.

        Raises:
            StorageFullError: There is no space left; nothing is left of it.
            StorageError: Any other failure to write.
        """
        directory = self._own_partial()
        with storage_errors(directory):
            return write_private(directory, data)

    def place(self, staged: Path, audio_sha256: str, kind: str) -> None:
        """Move a staged file to its name, durably, over what is there.

        Raises: StorageError.
        """
        name = Path(self.file_name(audio_sha256, kind))
        with storage_errors(name):
            make_directory(name.parent)
            staged.replace(name)
            sync_directory(name.parent)

    def remove(self, audio_sha256: str, kinds: Collection[str]) -> None:
        """Unlink files of an audio, and its directory when it is empty.

        Raises:
            StorageError: One of them is still there.
        """
        directory = self.audio_directory(audio_sha256)
        with storage_errors(directory):
            for kind in kinds:
                (directory / f"{kind}{SUFFIX}").unlink(missing_ok=True)
            remove_if_empty(directory)

    def remove_all(self, audio_sha256: str) -> None:
        """Remove all of an audio, whatever it is called, and what was set aside.

        Raises:
            StorageError: Some of it is still there.
        """
        remove_tree(self.audio_directory(audio_sha256))
        self.delete_quarantine(audio_sha256)

    def set_aside(self, audio_sha256: str, kind: str) -> None:
        """Move a file whose bytes are wrong out of the way, or remove it.

        Raises:
            StorageError: It is still where it was.
        """
        path = Path(self.file_name(audio_sha256, kind))
        aside = self.quarantine / audio_sha256
        with storage_errors(path):
            try:
                aside.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.replace(aside / path.name)
            except OSError:
                # Left in place it would stand for a good one for ever.
                path.unlink(missing_ok=True)
                remove_if_empty(aside)

    def discard(self, audio_sha256: str, deletion_id: int) -> None:
        """Move all of an audio into the trash, durably, as one rename each.

        The names in the trash say nothing of it.

        Raises:
            StorageError: Some of it may be where it was.
        """
        directory = self.audio_directory(audio_sha256)
        trash = self.trash / str(deletion_id)
        with storage_errors(trash):
            # The quarantine last: no reader can add to it once the rest is gone.
            for path in (directory, self.quarantine / audio_sha256):
                if path.exists():
                    _rename_into(path, trash)

    def empty_trash(self, deletion_id: int | None = None) -> None:
        """Remove what was moved there, for one deletion or for all.

        Raises:
            StorageError: Some of it is still there.
        """
        trash = self.trash if deletion_id is None else self.trash / str(deletion_id)
        remove_tree(trash)

    def delete_quarantine(self, audio_sha256: str) -> None:
        """Delete what of an audio was set aside.

        Raises: StorageError.
        """
        remove_tree(self.quarantine / _checked(audio_sha256))

    def quarantined(self) -> list[str]:
        """The audio of which something was set aside, newest first.

        Raises: StorageError.
        """
        names = [name for name in _names(self.quarantine) if is_address(name)]
        return sorted(names, key=lambda name: -_mtime_ns(self.quarantine / name))

    def quarantined_bytes(self, audio_sha256: str) -> int:
        """How much of an audio was set aside.

        Raises: StorageError.
        """
        path = self.quarantine / audio_sha256
        with storage_errors(path), suppress(FileNotFoundError):
            return sum((path / name).stat().st_size for name in _names(path))
        return 0

    def prefixes(self) -> list[str]:
        """Two hex digits each: the parts into which `store` can be walked.

        Raises: StorageError.
        """
        return _names(self.store)

    def addresses(self, prefix: str) -> list[str]:
        """The audio that has a directory in one part.

        Raises: StorageError.
        """
        return [name for name in _names(self.store / prefix) if is_address(name)]

    def kinds(self, audio_sha256: str) -> set[str]:
        """Which files of an audio are there.

        Raises: StorageError.
        """
        names = _names(self.audio_directory(audio_sha256))
        kinds = {name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)}
        return {kind for kind in kinds if kind == AUDIO_KIND or is_address(kind)}

    def misplaced(self, prefix: str) -> list[Path]:
        """What is in one part and should not be, by its name.

        Raises: StorageError.
        """
        part = self.store / prefix
        found = [
            part / name
            for name in _names(part)
            if not (is_address(name) and name.startswith(prefix))
        ]
        for sha in self.addresses(prefix):
            allowed = {f"{kind}{SUFFIX}" for kind in self.kinds(sha)}
            names = set(_names(part / sha)) - allowed
            found += [part / sha / name for name in sorted(names)]
        return found

    def sweep_partials(self) -> int:
        """Remove what dead processes were writing; return how many files.

        Raises: StorageError.
        """
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
        """What dead processes were writing, and what is in the trash.

        Raises: StorageError.
        """
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

    Raises:
        StorageError: Some of it is still there.
    """
    for _ in range(3):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
    with storage_errors(path), suppress(FileNotFoundError):
        shutil.rmtree(path)


def remove_if_empty(path: Path) -> None:
    """Remove a directory that has nothing in it; leave any other."""
    with suppress(OSError):
        path.rmdir()


def _rename_into(path: Path, trash: Path) -> None:
    # Another process may be emptying the trash, this directory of it included.
    for attempt in range(_NUM_ATTEMPTS):
        make_directory(trash)
        try:
            path.rename(trash / secrets.token_hex(8))
        except FileNotFoundError:
            if attempt + 1 == _NUM_ATTEMPTS:
                raise
        else:
            break
    sync_directory(path.parent)
    with suppress(FileNotFoundError):
        sync_directory(trash)


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


def _mtime_ns(path: Path) -> int:
    with storage_errors(path), suppress(FileNotFoundError):
        return path.stat().st_mtime_ns
    return 0


class DirectoryBlobs:
    """Files of a `StoreDirectory`; see `Blobs`."""

    is_remote = False

    def __init__(self, directory: StoreDirectory, database: Database):
        self._files = directory
        self._database = database

    def counts(self) -> dict[str, int]:
        """Nothing: all files are here."""
        return {}

    def has(self, file: StoredFile | None) -> bool:
        """Whether the row's file is there."""
        return file is not None and self._files.exists(file.audio_sha256, file.kind)

    def stage(self, data: bytes, audio_sha256: str) -> Staged:  # noqa: ARG002
        """Write a private file."""
        return Staged(data=data, path=self._files.stage(data))

    def place(
        self, db: Connection, staged: Staged, audio_sha256: str, kind: str
    ) -> None:
        """Move it to its name: in the transaction, so that nobody else does."""
        del db
        if staged.path is None:
            raise StorageError("staged in a bucket, placed in a directory")
        self._files.place(staged.path, audio_sha256, kind)

    def remove_strays(self) -> list[str]:
        """Nothing: a recovery goes through all files."""
        return []

    def unstage(self, staged: Staged) -> None:
        """Unlink it, if it was not moved; what stays is swept with the process."""
        if staged.path is not None:
            with suppress(OSError):
                staged.path.unlink(missing_ok=True)

    def unplace(self, audio_sha256: str, kind: str, db: Connection) -> None:
        """Remove the file again."""
        self.remove(db, audio_sha256, [kind])

    def cache(self, staged: Staged, audio_sha256: str, kind: str) -> None:
        """Nothing: it is here."""

    def read(
        self, audio_sha256: str, kind: str, parse: Callable[[bytes], T]
    ) -> T | None:
        """Read the file."""
        try:
            return self._parsed(audio_sha256, kind, parse)
        except SourceCorruptError:
            # It must not hide that the bytes are wrong.
            with suppress(StorageError):
                self._set_aside_audio(audio_sha256, parse)
            raise
        except EncodingCorruptError:
            with suppress(StorageError):
                self._files.set_aside(audio_sha256, kind)
            raise

    def read_here(
        self, audio_sha256: str, kind: str, parse: Callable[[bytes], T]
    ) -> T | None:
        """Read the file."""
        return self.read(audio_sha256, kind, parse)

    def remove(self, db: Connection, audio_sha256: str, kinds: Collection[str]) -> None:
        """Unlink files."""
        schema.check_turn(db)
        self._files.remove(audio_sha256, kinds)

    def discard(
        self, db: Connection, audio_sha256: str, keep: Collection[str], deletion_id: int
    ) -> None:
        """Move the audio's directory into the trash, or unlink a part of it."""
        if not keep:
            schema.check_turn(db)
            self._files.discard(audio_sha256, deletion_id)
            return
        self.remove(db, audio_sha256, self._files.kinds(audio_sha256) - set(keep))
        self._files.delete_quarantine(audio_sha256)

    def finish_discard(self, audio_sha256: str | None, deletion_id: int) -> None:
        """Empty the trash."""
        del audio_sha256
        self._files.empty_trash(deletion_id)

    def has_copies(self, audio_sha256: str) -> bool:
        """Never: files here are no copies."""
        del audio_sha256
        return False

    def delete_copies(self, audio_sha256: str) -> None:
        """Nothing: whoever deletes removes the files for all."""

    delete_unstored = delete_copies

    @property
    def store_id(self) -> StoreId:
        """The directory."""
        return store_id_of(self._files.root)

    def check_still(self) -> None:
        """See that the directory is the catalogue's, where it may be unmounted."""
        if self._database.backend.has_leases:
            binding.check_still(self._files.root, self._database)

    def problems(self) -> list[str]:
        """Compare files and rows."""
        return directory_problems(self._files, self._database)

    def sweep(self) -> int:
        """Nothing: files without a row are found by who goes through the directory."""
        return 0

    def _parsed(
        self, audio_sha256: str, kind: str, parse: Callable[[bytes], T]
    ) -> T | None:
        blob = self._files.read(audio_sha256, kind)
        return None if blob is None else parse(blob)

    def _set_aside_audio(self, sha: str, parse: Callable[[bytes], object]) -> None:
        """Move audio whose bytes are wrong into the quarantine, its row with it."""
        with self._database.write() as db:
            # A registration may have put it right since it was read.
            try:
                if self._parsed(sha, AUDIO_KIND, parse) is not None:
                    return
            except SourceCorruptError:
                schema.check_turn(db)
                self._files.set_aside(sha, AUDIO_KIND)
            stored_files.remove(db, sha, [AUDIO_KIND])


def directory_problems(directory: StoreDirectory, database: Database) -> list[str]:
    """Read every file and row; one line for each thing that is wrong, in no order.

    Others may go on using the directory.

    Raises:
        StorageError: The catalogue or a directory could not be read.
    """
    found = [*_deletion_problems(directory, database)]
    found += [f"left behind: {path}" for path in directory.leftovers()]
    differing: list[str] = []
    for prefix in sorted({*directory.prefixes(), *_prefixes(database)}):
        found += [f"misnamed: {path}" for path in directory.misplaced(prefix)]
        for sha in _addresses(directory, database, prefix):
            if any(_differences(directory, database, sha)):
                differing.append(sha)
            found += _corrupt(directory, sha)
    if differing:
        time.sleep(_SETTLE_SECONDS)
    for sha in differing:
        found += _differences(directory, database, sha)
    return found


def _deletion_problems(directory: StoreDirectory, database: Database) -> list[str]:
    with database.read() as db:
        unfinished = deletions.unfinished(db)
        addresses = directory.quarantined()
        stored = stored_files.kinds(db, addresses)
        owned = owners.owned(db, addresses)
    return [
        *(f"deletion {deletion.id}: not finished" for deletion in unfinished),
        *(
            f"audio {sha}: nobody has it, and some of it was set aside"
            for sha in addresses
            if not stored[sha] and sha not in owned
        ),
    ]


def _prefixes(database: Database) -> set[str]:
    with database.read() as db:
        return stored_files.prefixes(db) | owners.audio_prefixes(db)


def _addresses(directory: StoreDirectory, database: Database, prefix: str) -> list[str]:
    with database.read() as db:
        rows = stored_files.between(db, prefix, prefix + "g")
        referenced = owners.audio_between(db, prefix, prefix + "g")
    found = set(directory.addresses(prefix))
    return sorted(found | referenced | {row.audio_sha256 for row in rows})


def _differences(
    directory: StoreDirectory, database: Database, sha: str
) -> Iterator[str]:
    with database.snapshot() as db:
        rows = {row.kind: row for row in stored_files.of_audio(db, sha)}
        is_owned = owners.is_owned(db, sha)
        files = directory.kinds(sha)
    for kind in sorted(files - rows.keys()):
        yield f"audio {sha}: nobody has its {named(kind)}"
    for kind in sorted(rows.keys() - files):
        yield f"audio {sha}: its {named(kind)} is not there"
    if is_owned and AUDIO_KIND not in rows:
        yield f"audio {sha}: not stored"
    expected = Segment.REGISTERED if is_owned else Segment.INLINE
    for kind, row in sorted(rows.items()):
        if row.segment is not expected:
            yield f"audio {sha}: its {named(kind)} counts as {row.segment.value}"
        elif kind in files and directory.num_bytes(sha, kind) != row.num_bytes:
            yield f"audio {sha}: its {named(kind)} has not {row.num_bytes} bytes"


def _corrupt(directory: StoreDirectory, sha: str) -> Iterator[str]:
    for kind in sorted(directory.kinds(sha)):
        try:
            if (blob := directory.read(sha, kind)) is None:
                continue
            audio_file.check(blob, sha, kind)
        except (EncodingCorruptError, SourceCorruptError) as exc:
            yield f"corrupt: {directory.file_name(sha, kind)}: {exc.reason}"
        except StorageError as exc:
            yield f"unreadable: {exc}"


def _checked(text: str) -> str:
    """Return an address; keys arrive over RPC, and none may name a path of its own."""
    if ADDRESS.fullmatch(text) is None:
        raise StorageError(f"Not a content address: {text[:80]!r}")
    return text
