"""The file format of bundles: one file that holds a voice, and is read without trust.

A ZIP archive whose entries are not compressed, so that none is larger than the archive:
``voice.json`` first, ``audio.flac`` or ``audio.wav`` (or ``embedding.f32``, float32
in little-endian order, of a voice that was registered as one), ``consent.flac`` or
``consent.wav`` if the voice has a consent recording, and
``encodings/FINGERPRINT.safetensors``. ``voice.json`` names the others with their sizes
and SHA-256; ``signature`` is the HMAC-SHA256 of ``voice.json`` by the server's key.
Ids, dates and encodings are taken from signed bundles only.
"""

import hashlib
import hmac
import io
import re
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vllm_tts_cache.audio.reference import MAX_CLIPS
from vllm_tts_cache.catalogue.names import CONSENT_PREFIX, VOICE_PREFIX
from vllm_tts_cache.errors import InvalidBundleError

# Version 1 is for one clip; version 2 for several, whose starts a reader must know.
FORMAT_VERSION, CLIPS_VERSION = 1, 2
MAX_BYTES = 64 * 1024 * 1024
MAX_ENTRIES = 64

_VOICE, _SIGNATURE = "voice.json", "signature"
_MAX_VOICE_BYTES = 256 * 1024
EMBEDDING = "embedding.f32"
_NAME = re.compile(
    r"(audio|consent)\.(flac|wav)|embedding\.f32|encodings/[0-9a-f]{64}\.safetensors"
)
_MAX_DIRECTORY_BYTES = 64 * 1024
# The record that ends an archive without a comment: signature and numbers of disks,
# entries, bytes of the directory, where it begins, bytes of the comment.
_END_MAGIC = b"PK\x05\x06"
_END = struct.Struct("<10sHIIH")
_MAX_REASON_CHARS = 500
_LOCATOR_MAGIC, _LOCATOR_BYTES = b"PK\x06\x07", 20
_NO_ARCHIVE = (
    *(zipfile.BadZipFile, NotImplementedError, EOFError, OverflowError, OSError),
    *(RuntimeError, ValueError, struct.error),
)
# The same voice gives the same bytes, whenever it is exported.
_WRITTEN_AT = (1980, 1, 1, 0, 0, 0)

_Start = Annotated[int, Meta(ge=0, le=2**40)]
_Starts = Annotated[tuple[_Start, ...], Meta(min_length=2, max_length=MAX_CLIPS)]
_Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
_Size = Annotated[int, Meta(ge=0, le=2**53)]
_VoiceId = Annotated[str, Meta(pattern=f"^{VOICE_PREFIX}[0-9a-f]{{32}}$")]
_ConsentId = Annotated[str, Meta(pattern=f"^{CONSENT_PREFIX}[0-9a-f]{{32}}$")]


class File(msgspec.Struct, forbid_unknown_fields=True):
    """An entry beside ``voice.json``."""

    num_bytes: int
    sha256: _Sha256


class BundledConsent(msgspec.Struct, forbid_unknown_fields=True):
    """The consent recording of the voice."""

    name: str
    language: str
    id: _ConsentId | None = None
    created_at: float | None = None


class BundledVoice(msgspec.Struct, forbid_unknown_fields=True):
    """What ``voice.json`` holds; times are Unix seconds.

    Attributes:
        audio_sha256: None for a voice that was registered as an embedding.
        file_size: Bytes of the file that was uploaded.
        clip_starts: The first sample of each clip; unset for one clip.
    """

    format: int
    name: str
    consent: str
    audio_sha256: _Sha256 | None
    files: dict[str, File]
    id: _VoiceId | None = None
    ref_text: str | None = None
    description: str | None = None
    language: str | None = None
    labels: dict[str, str] = {}
    extras: dict[str, Any] = {}
    file_size: _Size | None = None
    mime_type: str | None = None
    created_at: float | None = None
    updated_at: float | None = None
    expires_at: float | None = None
    consent_recording: BundledConsent | None = None
    clip_starts: _Starts | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A bundle that was read: every size and SHA-256 is right.

    Attributes:
        files: Name -> bytes, of all that ``voice`` names.
        is_ours: Whether our key signed it: then a server that has this key gave the
            ids, and workers of such a server computed the encodings.
    """

    voice: BundledVoice
    files: Mapping[str, bytes]
    is_ours: bool

    def audio(self, what: str) -> bytes | None:
        """Return the file of ``audio`` or of ``consent``; None if there is none."""
        return self.files.get(f"{what}.flac", self.files.get(f"{what}.wav"))

    def encodings(self) -> dict[str, bytes]:
        """Fingerprint -> stored form."""
        paths = ((PurePosixPath(name), data) for name, data in self.files.items())
        return {p.stem: data for p, data in paths if p.parent.name == "encodings"}


def write(voice: BundledVoice, files: Mapping[str, bytes], key: bytes) -> bytes:
    """Return a signed bundle; sets ``voice.files``."""
    voice.files = {name: _file(data) for name, data in sorted(files.items())}
    voice_json = msgspec.json.format(msgspec.json.encode(voice))
    entries = {_VOICE: voice_json, _SIGNATURE: _signature(key, voice_json), **files}
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_STORED) as archive:
        for name, data in entries.items():
            archive.writestr(zipfile.ZipInfo(name, _WRITTEN_AT), data)
    return written.getvalue()


def read(data: bytes, key: bytes) -> Bundle:
    """Read a bundle, all or nothing.

    Raises: InvalidBundleError: ``data`` is no bundle, not whole, or another version's.
    """
    if len(data) > MAX_BYTES:
        raise InvalidBundleError(f"it has more than {MAX_BYTES >> 20} MiB")
    _check_directory(data)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = _entries(archive)
    except _NO_ARCHIVE as exc:
        raise InvalidBundleError("it is no bundle of a voice") from exc
    voice_json, signature = entries.pop(_VOICE, None), entries.pop(_SIGNATURE, b"")
    if voice_json is None:
        raise InvalidBundleError(f"it has no {_VOICE}")
    voice = _parsed(voice_json)
    if entries.keys() != voice.files.keys():
        raise InvalidBundleError(f"its entries are not those that {_VOICE} names")
    for name, file in voice.files.items():
        if _file(entries[name]) != file:
            raise InvalidBundleError(f"{name} is not what {_VOICE} says it is")
    is_ours = hmac.compare_digest(signature, _signature(key, voice_json))
    return Bundle(voice=voice, files=entries, is_ours=is_ours)


def _check_directory(data: bytes) -> None:
    """Refuse an archive with many entries before zipfile parses their directory.

    Raises: InvalidBundleError.
    """
    end = data[-_END.size :]
    if len(end) < _END.size or not end.startswith(_END_MAGIC):
        raise InvalidBundleError("it is no bundle of a voice")
    _, num_entries, num_bytes, _, num_comment_bytes = _END.unpack(end)
    if num_entries > MAX_ENTRIES or num_bytes > _MAX_DIRECTORY_BYTES:
        raise InvalidBundleError(f"it has more than {MAX_ENTRIES} entries")
    # ZIP64 has these numbers in another record; a locator before this one names it.
    leads_on = data[-_END.size - _LOCATOR_BYTES :].startswith(_LOCATOR_MAGIC)
    if num_comment_bytes or leads_on:
        raise InvalidBundleError("it is no bundle of a voice")


def _entries(archive: zipfile.ZipFile) -> dict[str, bytes]:
    infos = archive.infolist()
    if len(infos) > MAX_ENTRIES:
        raise InvalidBundleError(f"it has more than {MAX_ENTRIES} entries")
    if sum(info.file_size for info in infos) > MAX_BYTES:
        raise InvalidBundleError(f"its entries have more than {MAX_BYTES >> 20} MiB")
    entries: dict[str, bytes] = {}
    for info in infos:
        name = info.filename
        is_known = name in (_VOICE, _SIGNATURE) or _NAME.fullmatch(name)
        if name in entries or not is_known:
            raise InvalidBundleError(f"its entry {name!r:.80} is unknown, or repeated")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise InvalidBundleError(f"its entry {name} is compressed or encrypted")
        entries[name] = archive.read(info)
    return entries


def _parsed(voice_json: bytes) -> BundledVoice:
    if len(voice_json) > _MAX_VOICE_BYTES:
        raise InvalidBundleError(f"its {_VOICE} is too large")
    try:
        version = msgspec.json.decode(voice_json, type=_Version).format
        if version not in (FORMAT_VERSION, CLIPS_VERSION):
            known = f"{FORMAT_VERSION} and {CLIPS_VERSION}"
            raise InvalidBundleError(
                f"its format is {version}, and this server reads {known}; export it "
                "again with this server's version, or upgrade"
            )
        voice = msgspec.json.decode(voice_json, type=BundledVoice)
        if (voice.clip_starts is msgspec.UNSET) != (version == FORMAT_VERSION):
            raise InvalidBundleError(f"its format {version} does not fit its clips")
        return voice
    except (msgspec.MsgspecError, RecursionError) as exc:
        reason = str(exc)[:_MAX_REASON_CHARS]  # it quotes an unknown field whole
        raise InvalidBundleError(f"its {_VOICE} cannot be read: {reason}") from exc


class _Version(msgspec.Struct):
    format: int


def _file(data: bytes) -> File:
    return File(len(data), hashlib.sha256(data).hexdigest())


def _signature(key: bytes, voice_json: bytes) -> bytes:
    return hmac.digest(key, voice_json, "sha256").hex().encode()
