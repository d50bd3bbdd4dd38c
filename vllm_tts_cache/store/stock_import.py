"""Imports the voices that stock vLLM-Omni 0.30 left in a directory.

Each is a safetensors file with the tensor ``audio``, float32 ``(num_samples,)`` or
``(num_samples, num_channels)``, or with ``speaker_embedding``, float32 ``(dim,)``; what
else stock knows of the voice is text in the header's ``__metadata__``.

Each file is read once, so a start without new files opens none: rows of the table
``imported_file`` say which were read. The files stay where they are, because going back
to stock must find them, until their voice is deleted, or registered again with another
clip.
"""

import json
import os
import struct
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load
from sqlalchemy import Connection, func, select

from vllm_tts_cache.audio.decode import DecodedAudio
from vllm_tts_cache.audio.reference import ReferenceAudio, Segment
from vllm_tts_cache.catalogue import speakers
from vllm_tts_cache.catalogue.deletions import Deletion, stock_name_hash
from vllm_tts_cache.catalogue.names import clean, fold
from vllm_tts_cache.catalogue.records import DEFAULT_TENANT, NewSpeaker
from vllm_tts_cache.catalogue.schema import imported_file
from vllm_tts_cache.catalogue.sqlite import FILE_NAME, opening_lock
from vllm_tts_cache.config import RegistrationPolicy
from vllm_tts_cache.errors import SpeakerExistsError, SpeakerRequestError
from vllm_tts_cache.files import storage_errors
from vllm_tts_cache.logs import encodable, logger
from vllm_tts_cache.store import registering
from vllm_tts_cache.store.speaker_store import SpeakerStore
from vllm_tts_cache.tenants import Tenant

# Stock writes a few hundred bytes and, from a 10 MB upload, some tens of MB.
MAX_HEADER_BYTES = 1024**2
MAX_FILE_BYTES = 512 * 1024**2

_FILE = imported_file.c


class StockFileError(Exception):
    """A file of stock vLLM-Omni is not imported; the message says why."""


@dataclass(frozen=True, slots=True)
class ImportedFile:
    """A file that the import has read; with another time or size it is a new file.

    Attributes:
        mtime_ns: When its content last changed.
        name_key: Folded name of the voice in it; empty if it has none.
        created_at: When stock registered the voice, in Unix seconds.
    """

    file_name: str
    mtime_ns: int
    size: int
    name_key: str = ""
    created_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StockVoice:
    """A voice file with the name to show, and stock's fields of its header, as text."""

    name: str
    metadata: dict[str, str]
    file: ImportedFile


def import_stock_voices(store: SpeakerStore) -> "StockImport":
    """Register the voices of stock's files that were not read before.

    Only the top level of ``SPEAKER_SAMPLES_DIR`` is read. Of several files with
    one voice name the newest counts. A registered voice that is as new is not
    overwritten, a deleted one does not return, and the store's limit does not apply.
    Processes that import at once take turns; those that come later find nothing to do.

    Raises: StorageError: The directory, the catalogue or the store failed. What was
        imported so far stays; the next import goes on from there.
    """
    directory = store.directory
    with storage_errors(directory), opening_lock(directory / FILE_NAME):
        done = StockImport(store)
        done.run()
    if done.imported:
        logger.info("Imported %d voices of stock vLLM-Omni.", len(done.imported))
    if done.skipped:
        # The files are called after voices, and reasons quote what is in them.
        message = (
            "%d files of stock vLLM-Omni are not imported; the DEBUG log names them."
        )
        logger.warning(message, len(done.skipped))
    for file, reason in done.skipped:
        logger.debug("Not imported: %s: %s", encodable(file), encodable(reason))
    return done


class StockImport:
    """An import, and what it did with the files that were new.

    Attributes:
        imported: Names of the voices that are registered now, as given.
        skipped: (file name, why it was not imported).
    """

    def __init__(self, store: SpeakerStore):
        self._store = store
        self._directory = store.directory
        self.imported: list[str] = []
        self.skipped: list[tuple[str, str]] = []

    def run(self) -> None:
        """Import the files. Raises: StorageError."""
        for *older, newest in self._by_voice(self._new_files()):
            self._import(newest)
            if older:
                reason = f"{newest.file.file_name} is a newer file of this voice"
                with self._store.database.write() as db:
                    for voice in older:
                        _remember(db, voice.file)
                self.skipped += [(voice.file.file_name, reason) for voice in older]

    def _new_files(self) -> list[ImportedFile]:
        with self._store.database.read() as db:
            rows = db.execute(select(_FILE.file_name, _FILE.mtime_ns, _FILE.size))
            known = {tuple(row) for row in rows}
        files: list[ImportedFile] = []
        with os.scandir(self._directory) as entries:
            for entry in entries:
                if not entry.name.endswith(".safetensors"):
                    continue
                with self._reported(entry.name):
                    if encodable(entry.name) != entry.name:
                        raise StockFileError("its name is not UTF-8")
                    if not entry.is_file():
                        raise StockFileError("it is not a file")
                    stat = entry.stat()
                    found = entry.name, stat.st_mtime_ns, stat.st_size
                    if found not in known:
                        files.append(ImportedFile(*found))
        return files

    def _by_voice(self, files: list[ImportedFile]) -> list[list[StockVoice]]:
        """Group the new files by voice, newest last; voices by their newest file."""
        voices: dict[str, list[StockVoice]] = {}
        for file in sorted(files, key=attrgetter("file_name")):
            with self._reported(file.file_name, file):
                voice = _read_header(self._directory / file.file_name, file)
                voices.setdefault(voice.file.name_key, []).append(voice)
        # Sorts are stable, so the file name decides between files of one second.
        age = attrgetter("file.created_at")
        ordered = [sorted(generations, key=age) for generations in voices.values()]
        return sorted(ordered, key=lambda generations: age(generations[-1]))

    def _import(self, voice: StockVoice) -> None:
        """Register a voice, and record its file as imported.

        The limits do not apply: voices that stock kept must not be lost because they
        are more than may be added now.
        """
        file = voice.file
        with self._reported(file.file_name, file):
            # Checked before the audio is read, and again when the row is written.
            with self._store.database.read() as db:
                _check(db, file, "overwrite")
            new, audio = _read(self._directory / file.file_name, voice)

            def commit(db: Connection) -> Deletion | None:
                _check(db, file, self._store.registrations.policy)
                _remember(db, file)
                replaced = speakers.find_named(db, new.tenant, new.name_key)
                return registering.replace(db, new, replaced).deletion

            owner = Tenant(name=new.tenant)
            deletion = self._store.writer.store_audio(
                audio, Segment.REGISTERED, commit, owner=owner, is_bounded=False
            )
            if deletion is not None:
                self._store.remove_files(deletion)
            self.imported.append(voice.name)

    @contextmanager
    def _reported(
        self, file_name: str, file: ImportedFile | None = None
    ) -> Generator[None, None, None]:
        """Skip and report a file that cannot be used, instead of ending the import.

        A file with invalid content is recorded as read; one that the disk failed to
        read is tried again next time.
        """
        try:
            yield
        except SpeakerExistsError as exc:  # as an alias, which may be given up
            self.skipped.append((file_name, str(exc)))
        except (StockFileError, SpeakerRequestError) as exc:
            self.skipped.append((file_name, str(exc)))
            if file is not None:
                with self._store.database.write() as db:
                    _remember(db, file)
        except OSError as exc:
            self.skipped.append((file_name, exc.strerror or str(exc)))


def _remember(db: Connection, file: ImportedFile) -> None:
    """Insert or update the file's row; a voice that was deleted stays deleted."""
    where = _FILE.file_name == file.file_name
    old = db.execute(select(_FILE.name_key, _FILE.deleted_at).where(where)).first()
    row = asdict(file)
    if old is not None and old.deleted_at is not None:
        names = file.name_key, stock_name_hash(file.name_key)
        if old.name_key in names and file.created_at <= old.deleted_at:
            del row["name_key"]
            db.execute(imported_file.update().where(where).values(**row))
            return
    db.execute(imported_file.delete().where(where))
    db.execute(imported_file.insert(), row)


def _check(db: Connection, file: ImportedFile, policy: RegistrationPolicy) -> None:
    """Refuse a voice that was deleted since, or whose name is registered.

    Raises: StockFileError.
    """
    names = _FILE.name_key.in_([file.name_key, stock_name_hash(file.name_key)])
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


def _read_header(path: Path, file: ImportedFile) -> StockVoice:
    """Read what the header says; no tensor is read.

    Raises:
        StockFileError: The file is too large, no safetensors file, or has no voice.
        InvalidSpeakerError: The voice has a name that cannot be registered.
        OSError: The file could not be read this time.
    """
    if file.size > MAX_FILE_BYTES:
        raise StockFileError(f"it has more than {MAX_FILE_BYTES} bytes")
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
    fields = cast(dict[str, Any], header).get("__metadata__")
    if not isinstance(fields, dict):
        raise StockFileError("its header has no metadata")
    pairs = cast(dict[str, Any], fields).items()
    metadata = {key: value for key, value in pairs if isinstance(value, str)}
    given = metadata.get("name") or metadata.get("voice_name_lower")
    if not given:
        raise StockFileError("its header names no voice")
    name = clean(given)
    created_at = _integer(metadata, "created_at")
    # Stock dates every file; one without a date is as old as its bytes.
    dated = file.mtime_ns / 1e9 if created_at is None else created_at
    file = replace(file, name_key=fold(name), created_at=dated)
    return StockVoice(name=name, metadata=metadata, file=file)


def _integer(metadata: dict[str, str], field: str) -> int | None:
    text = metadata.get(field, "")
    # Up to 15 digits: what SQLite, and a float, holds exactly.
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else None


def _read(path: Path, voice: StockVoice) -> tuple[NewSpeaker, DecodedAudio | None]:
    """Read a voice's audio or embedding.

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
    metadata, file = voice.metadata, voice.file
    audio: ReferenceAudio | None = None
    sample: dict[str, Any]
    if "audio" in tensors:
        samples = _mono(tensors["audio"])
        if not (sample_rate_hz := _integer(metadata, "sample_rate")):
            raise StockFileError("its header has no sample rate")
        audio = ReferenceAudio.of(samples, sample_rate_hz)
        names = "audio_sha256", "num_samples", "sample_rate_hz"
        sample = {field: getattr(audio, field) for field in names}
    elif "speaker_embedding" in tensors:
        embedding = tensors["speaker_embedding"]
        if embedding.dtype.kind != "f":
            raise StockFileError(f"its speaker embedding is {embedding.dtype}")
        values = np.ravel(embedding).astype(np.float32).tolist()
        sample = {"embedding": tuple(values)}
    else:
        raise StockFileError("it has neither audio nor a speaker embedding")
    file_size = _integer(metadata, "file_size")
    new = NewSpeaker(
        **sample,
        name=voice.name,
        consent=metadata.get("consent", ""),
        ref_text=metadata.get("ref_text"),
        description=metadata.get("speaker_description"),
        mime_type=metadata.get("mime_type"),
        original_filename=metadata.get("original_filename"),
        file_size=file.size if file_size is None else file_size,
        created_at=file.created_at,
        taken_over=True,
    )
    return new, None if audio is None else DecodedAudio(audio, ())


def _mono(audio: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    if audio.ndim not in (1, 2) or not audio.size or audio.dtype.kind != "f":
        raise StockFileError(f"its audio is {audio.dtype} of shape {audio.shape}")
    mono = audio if audio.ndim == 1 else audio.mean(axis=1)
    if not np.isfinite(mono).all():
        raise StockFileError("its audio has values that are no numbers")
    return np.ascontiguousarray(mono, dtype=np.float32)
