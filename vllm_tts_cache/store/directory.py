"""One directory per audio: its paths, and all that is done to files in it.

    store/ab/<audio_sha256>/audio.safetensors
    store/ab/<audio_sha256>/<encoder_fingerprint>.safetensors
    partial/<process>/      being written
    quarantine/<audio_sha256>/   files whose bytes were wrong
    trash/<deletion>/       deleted, not yet removed

Files appear in and go from ``store`` within write transactions of the catalogue only
(`place`, `remove`, `discard`), so that no two processes do it at once.
"""

import os
import secrets
import shutil
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from vllm_tts_cache.catalogue.record import AUDIO_KIND, PREVIEW_PREFIX
from vllm_tts_cache.errors import StorageError
from vllm_tts_cache.files import (
    make_directory,
    read_whole,
    storage_error,
    storage_errors,
    sync_directory,
    write_private,
)
from vllm_tts_cache.store import locks
from vllm_tts_cache.store.encoding import checked_address, is_address
from vllm_tts_cache.store.locks import Presence

SUFFIX = ".safetensors"
_NUM_ATTEMPTS = 5


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
        sha = checked_address(audio_sha256)
        return self.store / sha[:2] / sha

    def file_name(self, audio_sha256: str, kind: str) -> str:
        """Where a file is, or would be.

        A string, because making a ``Path`` takes as long as asking the disk.

        Raises:
            StorageError: A part is not 64 lower-case hex digits.
        """
        sha = checked_address(audio_sha256)
        if kind != AUDIO_KIND:
            checked_address(kind.removeprefix(PREVIEW_PREFIX))
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
        remove_tree(self.quarantine / checked_address(audio_sha256))

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
        return {
            kind
            for kind in kinds
            if kind == AUDIO_KIND or is_address(kind.removeprefix(PREVIEW_PREFIX))
        }

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
