"""Reading one voice file of stock vLLM-Omni 0.30.

A safetensors file with the tensor ``audio``, float32 ``(num_samples,)`` or
``(num_samples, num_channels)``, or with ``speaker_embedding``, float32 ``(dim,)``;
what else stock knows of the voice is text in the header's ``__metadata__``. Rows of the
table ``imported_file`` say which of the files were read.
"""

import hashlib
import json
import os
import struct
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load
from sqlalchemy import Connection, case, func, select

from vllm_tts_cache.catalogue import deletions, speakers
from vllm_tts_cache.catalogue.names import clean, fold
from vllm_tts_cache.catalogue.records import DEFAULT_TENANT, unpack_embedding
from vllm_tts_cache.catalogue.schema import imported_file
from vllm_tts_cache.config import RegistrationPolicy

# Prefix of the recorded name of a removed file; a hash follows.
_REMOVED = "removed:"

# Stock writes a few hundred bytes and, from a 10 MB upload, some tens of MB.
MAX_HEADER_BYTES = 1024**2
MAX_FILE_BYTES = 512 * 1024**2

Samples = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedFile:
    """A file that the import has read; with another time or size it is a new file.

    Attributes:
        file_name: Its name in the directory.
        mtime_ns: When its content last changed.
        size: Its length in bytes.
        name_key: Folded name of the voice in it; empty if it has none.
        created_at: When stock registered the voice, in Unix seconds.
    """

    file_name: str
    mtime_ns: int
    size: int
    name_key: str = ""
    created_at: float = 0.0


_FILE = imported_file.c
_LOOKED_AT = _FILE.file_name, _FILE.mtime_ns, _FILE.size


def known(db: Connection) -> dict[str, tuple[int, int]]:
    """Return all files that were read: name -> (mtime_ns, size)."""
    rows = db.execute(select(*_LOOKED_AT))
    return {name: (mtime_ns, size) for name, mtime_ns, size in rows}


def remember(db: Connection, file: ImportedFile) -> None:
    """Insert or update the file's row; a voice that was deleted stays deleted."""
    where = _FILE.file_name == file.file_name
    old = db.execute(select(_FILE.name_key, _FILE.deleted_at).where(where)).first()
    row = asdict(file)
    if old is not None and old.deleted_at is not None:
        names = file.name_key, _hashed(file.name_key)
        if old.name_key in names and file.created_at <= old.deleted_at:
            del row["name_key"]
            db.execute(imported_file.update().where(where).values(**row))
            return
    db.execute(imported_file.delete().where(where))
    db.execute(imported_file.insert(), row)


def has_files(db: Connection, name_key: str) -> bool:
    """Whether files of stock's hold a voice of this name that was not deleted."""
    query = select(1).where(_FILE.name_key == name_key, _FILE.deleted_at.is_(None))
    return db.execute(query.limit(1)).first() is not None


def mark_deleted(db: Connection, name_key: str, deletion_id: int) -> None:
    """Let a voice's deletion remove its files, and replace its name by a hash.

    The rows stay and say that it was deleted: a copy of such a file does not bring the
    voice back.
    """
    now, created_at = time.time(), _FILE.created_at
    values = {
        "name_key": _hashed(name_key),
        # Stock dates a voice up to some seconds ahead of the clock.
        "deleted_at": case((created_at > now, created_at), else_=now),
        "deletion_id": deletion_id,
    }
    is_present = _FILE.file_name.not_like(f"{_REMOVED}%")
    names = _FILE.name_key.in_([name_key, _hashed(name_key)])
    db.execute(imported_file.update().where(names, is_present).values(**values))


def rename(db: Connection, old_name_key: str, name_key: str) -> None:
    """Record a voice's new name for its files, so that they are deleted with it.

    The import does not read them again: they have a row.
    """
    where = _FILE.name_key == old_name_key, _FILE.deleted_at.is_(None)
    db.execute(imported_file.update().where(*where).values(name_key=name_key))


def to_remove(db: Connection, deletion_id: int) -> list[ImportedFile]:
    """Return stock's files that a deletion has to remove."""
    query = select(*_LOOKED_AT).where(_FILE.deletion_id == deletion_id)
    return [ImportedFile(**row) for row in db.execute(query).mappings()]


def delete_file_name(db: Connection, file_name: str) -> None:
    """Replace a removed file's name, which contains the voice's, by a hash."""
    hashed = f"{_REMOVED}{hashlib.sha256(file_name.encode()).hexdigest()}"
    db.execute(imported_file.delete().where(_FILE.file_name == hashed))
    where = _FILE.file_name == file_name
    values = {"file_name": hashed, "deletion_id": None}
    db.execute(imported_file.update().where(where).values(**values))


def check(db: Connection, file: ImportedFile, policy: RegistrationPolicy) -> None:
    """Refuse a voice that was deleted since, or whose name is registered.

    Raises: StockFileError.
    """
    names = _FILE.name_key.in_([file.name_key, _hashed(file.name_key)])
    deleted_at = db.execute(select(func.max(_FILE.deleted_at)).where(names)).scalar()
    if deleted_at is not None and file.created_at <= deleted_at:
        raise StockFileError("the voice was deleted after the file was written")
    registered = speakers.find_named(db, DEFAULT_TENANT, file.name_key)
    if registered is None:
        return
    if registered.created_at >= file.created_at:
        raise StockFileError("the registered voice of this name is as new or newer")
    if policy == "immutable":
        reason = "the name is registered and the registration policy is 'immutable'"
        raise StockFileError(reason)


def _hashed(name_key: str) -> str:
    return f"sha256:{deletions.name_hash(DEFAULT_TENANT, name_key)}"


class StockFileError(Exception):
    """A file of stock vLLM-Omni is not imported; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StockVoice:
    """What the header of a voice file says.

    Attributes:
        name: The name to show.
        metadata: Stock's fields, as text.
        sample_rate_hz: Rate of the audio; None if the header has none.
        file_size: Bytes of the file that was uploaded to stock, or of this one.
        file: The file, as it is remembered after the import.
    """

    name: str
    metadata: dict[str, str]
    sample_rate_hz: int | None
    file_size: int
    file: ImportedFile


def read_header(path: Path, file: ImportedFile) -> StockVoice:
    """Read what the header says; no tensor is read.

    Raises:
        StockFileError: The file is too large, no safetensors file, or has no voice.
        InvalidSpeakerError: The voice has a name that cannot be registered.
        OSError: The file could not be read this time.
    """
    if file.size > MAX_FILE_BYTES:
        raise StockFileError(f"it has more than {MAX_FILE_BYTES} bytes")
    metadata = _metadata(path)
    given = metadata.get("name") or metadata.get("voice_name_lower")
    if not given:
        raise StockFileError("its header names no voice")
    name = clean(given)
    created_at = _integer(metadata, "created_at")
    file_size = _integer(metadata, "file_size")
    # Stock dates every file; one without a date is as old as its bytes.
    dated = file.mtime_ns / 1e9 if created_at is None else created_at
    return StockVoice(
        name=name,
        metadata=metadata,
        sample_rate_hz=_integer(metadata, "sample_rate"),
        file_size=file.size if file_size is None else file_size,
        file=replace(file, name_key=fold(name), created_at=dated),
    )


def read_tensors(path: Path) -> tuple[Samples | None, tuple[float, ...] | None]:
    """Return the audio, mono ``(num_samples,)``, and the embedding; one is None.

    Raises:
        StockFileError: The file has neither, or one in a form that stock never writes.
        OSError: The file could not be read this time.
    """
    # Not safe_open: it reports every failure to open as a missing file.
    data = path.read_bytes()
    try:
        tensors = load(data)
    except (SafetensorError, KeyError, ValueError) as exc:
        raise StockFileError(f"its tensors cannot be read: {exc}") from exc
    if "audio" in tensors:
        return _mono(tensors["audio"]), None
    if "speaker_embedding" in tensors:
        return None, _vector(tensors["speaker_embedding"])
    raise StockFileError("it has neither audio nor a speaker embedding")


def _metadata(path: Path) -> dict[str, str]:
    with path.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= MAX_HEADER_BYTES:
            raise StockFileError("it does not begin with a safetensors header")
        text = stream.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise StockFileError("its header is not JSON") from exc
    if len(text) < length or not isinstance(header, dict):
        raise StockFileError("its header is not that of a safetensors file")
    metadata = cast(dict[str, Any], header).get("__metadata__")
    if not isinstance(metadata, dict):
        raise StockFileError("its header has no metadata")
    fields = cast(dict[str, Any], metadata).items()
    return {key: value for key, value in fields if isinstance(value, str)}


def _integer(metadata: dict[str, str], field: str) -> int | None:
    text = metadata.get(field, "")
    # Up to 15 digits: what SQLite, and a float, holds exactly.
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None


def _mono(audio: npt.NDArray[Any]) -> Samples:
    if audio.ndim not in (1, 2) or not audio.size or audio.dtype.kind != "f":
        raise StockFileError(f"its audio is {audio.dtype} of shape {audio.shape}")
    mono = audio if audio.ndim == 1 else audio.mean(axis=1)
    if not np.isfinite(mono).all():
        raise StockFileError("its audio has values that are no numbers")
    return np.ascontiguousarray(mono, dtype=np.float32)


def _vector(embedding: npt.NDArray[Any]) -> tuple[float, ...]:
    if embedding.dtype.kind != "f":
        raise StockFileError(f"its speaker embedding is {embedding.dtype}")
    return unpack_embedding(np.ascontiguousarray(embedding, dtype="<f4").tobytes())


def described(entry: "os.DirEntry[str]") -> ImportedFile:
    """Return name, time and size of a directory's entry.

    Raises:
        StockFileError: The entry is no regular file, or its name is not UTF-8.
        OSError: The entry is gone.
    """
    try:
        entry.name.encode()
    except UnicodeEncodeError as exc:
        raise StockFileError("its name is not UTF-8") from exc
    if not entry.is_file():
        raise StockFileError("it is not a file")
    stat = entry.stat()
    return ImportedFile(
        file_name=entry.name, mtime_ns=stat.st_mtime_ns, size=stat.st_size
    )
