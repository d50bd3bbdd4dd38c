"""Many bundles as one stream: what is in an archive, and how it is read without trust.

A tar file, not compressed, of files in no folder: ``NNNNNN-NAME.voice``, a bundle each,
and last ``archive.json``, which says how many there are and what was left out. Both
sides hold one bundle at a time. A file's name is shown, and never used as a path.
"""

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

import msgspec

from vllm_tts_cache.errors import InvalidArchiveError
from vllm_tts_cache.store.bundle_format import MAX_BYTES

FORMAT_VERSION = 1
SUMMARY = "archive.json"
MEDIA_TYPE = "application/x-tar"
MAX_LISTED = 1000

_BLOCK_BYTES = 512
_MAGIC_AT, _MAGIC = 257, b"ustar"
# A header has room for 100 bytes: the number, the dash and the suffix take 20 at most.
_MAX_NAME_BYTES = 80
_SUFFIX = ".voice"
_MAX_SUMMARY_BYTES = 4 * 1024 * 1024


class LeftOut(msgspec.Struct, forbid_unknown_fields=True):
    """A voice that was asked for, and is not in the archive."""

    name: str
    reason: str


class Summary(msgspec.Struct, forbid_unknown_fields=True):
    """What ``archive.json`` holds.

    Attributes:
        num_voices: Bundles before it.
        num_left_out: Voices that are missing.
        left_out: The first of those.
    """

    format: int = FORMAT_VERSION
    num_voices: int = 0
    num_left_out: int = 0
    left_out: list[LeftOut] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A file of an archive that was read: a bundle, as far as is known yet."""

    name: str
    data: bytes


class ArchiveWriter:
    """Makes the bytes that stand around bundles; who asks for them writes them."""

    def __init__(self) -> None:
        self._summary = Summary()

    def voice(self, name: str, num_bytes: int) -> tuple[bytes, bytes]:
        """Return what goes before a voice's bundle of so many bytes, and behind it."""
        self._summary.num_voices += 1
        file_name = f"{self._summary.num_voices:06}-{safe_name(name)}{_SUFFIX}"
        return _around(file_name, num_bytes)

    def leave_out(self, name: str, reason: str) -> None:
        """Have the end say that a voice is missing, and why."""
        self._summary.num_left_out += 1
        if len(self._summary.left_out) < MAX_LISTED:
            self._summary.left_out.append(LeftOut(name, reason))

    def end(self) -> bytes:
        """Return the end of the archive."""
        told = msgspec.json.format(msgspec.json.encode(self._summary))
        before, behind = _around(SUMMARY, len(told))
        return before + told + behind + bytes(2 * _BLOCK_BYTES)


class ArchiveReader:
    """Gives the bundles of an archive, one at a time.

    Args:
        file: Read from where it is, to the archive's end; need not be seekable.

    Attributes:
        num_voices: Bundles so far.
        summary: What the archive says of itself, once all of it was read; None of one
            that another program packed.
    """

    def __init__(self, file: IO[bytes]):
        self._file = file
        self.num_voices = 0
        self.summary: Summary | None = None

    def __iter__(self) -> Iterator[Member]:
        """Yield bundles.

        Raises:
            InvalidArchiveError: It is no archive, or is not whole.
            OSError: It cannot be read.
        """
        while (header := self._header()) is not None:
            if self.summary is not None:
                raise self._invalid(f"something follows {SUMMARY}, which is its end")
            if header.name == SUMMARY:
                self.summary = self._told(header.size)
                continue
            if header.size > MAX_BYTES:
                raise self._invalid(f"a file in it has more than {MAX_BYTES >> 20} MiB")
            data = self._content(header.size)
            self.num_voices += 1
            yield Member(name=header.name, data=data)
        if self.summary is not None and self.summary.num_voices != self.num_voices:
            promised = self.summary.num_voices
            raise self._invalid(f"it says that it holds {promised} voices")

    def _header(self) -> tarfile.TarInfo | None:
        block = self._read(_BLOCK_BYTES)
        if not any(block):
            return None
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as exc:
            raise self._invalid("it is no tar file, or a damaged one") from exc
        if header.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            raise self._invalid(
                "it holds something else than files with short names: a folder, a "
                "link, a device or an extension of the format"
            )
        if "/" in header.name or "\\" in header.name or header.size < 0:
            raise self._invalid("it holds a file in a folder, or of no size")
        return header

    def _told(self, num_bytes: int) -> Summary:
        if num_bytes > _MAX_SUMMARY_BYTES:
            raise self._invalid(f"its {SUMMARY} is too large")
        try:
            summary = msgspec.json.decode(self._content(num_bytes), type=Summary)
        except (msgspec.MsgspecError, RecursionError) as exc:
            raise self._invalid(f"its {SUMMARY} cannot be read: {exc}") from exc
        if summary.format != FORMAT_VERSION:
            raise self._invalid(f"its format is {summary.format}")
        return summary

    def _content(self, num_bytes: int) -> bytes:
        data = self._read(num_bytes)
        self._read(-num_bytes % _BLOCK_BYTES)
        return data

    def _read(self, num_bytes: int) -> bytes:
        data = self._file.read(num_bytes)
        if len(data) < num_bytes:
            raise self._invalid("it ends in the middle")
        return data

    def _invalid(self, reason: str) -> InvalidArchiveError:
        return InvalidArchiveError(reason, self.num_voices)


def is_archive(head: bytes) -> bool:
    """Whether a file that begins like this is one."""
    return head[_MAGIC_AT : _MAGIC_AT + len(_MAGIC)] == _MAGIC


def safe_name(name: str, max_bytes: int = _MAX_NAME_BYTES) -> str:
    """A voice's name as part of a file's; voices of stock's may hold anything."""
    safe = "".join(
        "_" if not character.isprintable() or character in "/\\" else character
        for character in name
    )
    encoded = safe.lstrip(".").encode(errors="replace")
    shown = encoded[:max_bytes].decode(errors="ignore")
    return shown or "voice"


def _around(name: str, num_bytes: int) -> tuple[bytes, bytes]:
    header = tarfile.TarInfo(name)
    header.size = num_bytes
    header.mode = 0o600
    block = header.tobuf(tarfile.USTAR_FORMAT, "utf-8", "surrogateescape")
    return block, bytes(-num_bytes % _BLOCK_BYTES)
