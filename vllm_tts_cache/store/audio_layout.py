"""Where stored audio lies: ``<root>/v1/<segment>/<2 hex>/<sha256>.safetensors``."""

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vllm_tts_cache.catalogue.segment import Segment
from vllm_tts_cache.files import PARTIAL_PREFIX, storage_errors

_SHA256 = re.compile(r"[0-9a-f]{64}")
_SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class StoreLayout:
    """Names of files and directories under one root; it writes nothing."""

    root: Path

    def path(self, audio_sha256: str, segment: Segment) -> Path:
        """Where the audio is, or would be.

        Raises:
            ValueError: Not 64 lowercase hex digits; nothing else may name a path.
        """
        if not _SHA256.fullmatch(audio_sha256):
            raise ValueError(f"not a SHA-256 in hex: {audio_sha256[:80]!r}")
        name = f"{audio_sha256}{_SUFFIX}"
        return self._directory(segment) / audio_sha256[:2] / name

    def quarantine_path(self, audio_sha256: str) -> Path:
        """Where the audio goes when its bytes are wrong."""
        name = self.path(audio_sha256, Segment.INLINE).name
        return self.root / "quarantine" / name

    def iter_files(self, segment: Segment) -> Iterator[Path]:
        """Every published file of a segment, whatever its name, in no order."""
        for path in self._iter_all(segment):
            if not path.name.startswith(PARTIAL_PREFIX):
                yield path

    def iter_partials(self, older_than_seconds: float) -> Iterator[Path]:
        """Files that writers began at least so long ago and have not published."""
        latest = time.time() - older_than_seconds
        for segment in Segment:
            for path in self._iter_all(segment):
                if path.name.startswith(PARTIAL_PREFIX) and _mtime(path) <= latest:
                    yield path

    def audio_sha256(self, path: Path) -> str | None:
        """The address that a file of :meth:`iter_files` is named by, if it is."""
        sha256 = path.name.removesuffix(_SUFFIX)
        if not _SHA256.fullmatch(sha256) or path.name == sha256:
            return None
        return sha256 if path.parent.name == sha256[:2] else None

    def _directory(self, segment: Segment) -> Path:
        # The version is in the path: a new format never meets an old file.
        return self.root / "v1" / segment.value

    def _iter_all(self, segment: Segment) -> Iterator[Path]:
        for path in _iter_directory(self._directory(segment)):
            if path.is_dir():
                yield from _iter_directory(path)
            else:
                yield path


def _mtime(path: Path) -> float:
    with storage_errors(path), suppress(FileNotFoundError):
        return path.lstat().st_mtime
    return float("inf")  # published meanwhile


def _iter_directory(path: Path) -> Iterator[Path]:
    with storage_errors(path), suppress(FileNotFoundError), os.scandir(path) as entries:
        for entry in entries:
            yield path / entry.name
