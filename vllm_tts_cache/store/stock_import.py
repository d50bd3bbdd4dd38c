"""Imports the voices that stock vLLM-Omni 0.30 left in a directory.

Each file is read once, so a start without new files opens none. The files stay where
they are, because going back to stock must find them, until their voice is deleted, or
registered again with another clip.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path

from vllm_tts_cache.audio.decode import DecodedAudio
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.catalogue.records import NewSpeaker
from vllm_tts_cache.catalogue.sqlite import FILE_NAME, opening_lock
from vllm_tts_cache.errors import SpeakerExistsError, SpeakerRequestError
from vllm_tts_cache.files import storage_errors
from vllm_tts_cache.logs import encodable, logger
from vllm_tts_cache.store import stock_files
from vllm_tts_cache.store.speaker_store import SpeakerStore
from vllm_tts_cache.store.stock_files import ImportedFile, StockFileError, StockVoice


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
                self._remember([voice.file for voice in older])
                skipped = ((voice.file.file_name, reason) for voice in older)
                self.skipped.extend(skipped)

    def _new_files(self) -> list[ImportedFile]:
        with self._store.database.read() as db:
            known = stock_files.known(db)
        files: list[ImportedFile] = []
        with os.scandir(self._directory) as entries:
            for entry in entries:
                if not entry.name.endswith(".safetensors"):
                    continue
                with self._reported(entry.name):
                    file = stock_files.described(entry)
                    if known.get(file.file_name) != (file.mtime_ns, file.size):
                        files.append(file)
        return files

    def _by_voice(self, files: list[ImportedFile]) -> list[list[StockVoice]]:
        """Group the new files by voice, newest last; voices by their newest file."""
        voices: dict[str, list[StockVoice]] = {}
        for file in sorted(files, key=attrgetter("file_name")):
            with self._reported(file.file_name, file):
                voice = stock_files.read_header(self._directory / file.file_name, file)
                voices.setdefault(voice.file.name_key, []).append(voice)
        # Sorts are stable, so the file name decides between files of one second.
        age = attrgetter("file.created_at")
        ordered = [sorted(generations, key=age) for generations in voices.values()]
        return sorted(ordered, key=lambda generations: age(generations[-1]))

    def _import(self, voice: StockVoice) -> None:
        file = voice.file
        with self._reported(file.file_name, file):
            # Checked before the audio is read, and again when the row is written.
            with self._store.database.read() as db:
                stock_files.check(db, file, "overwrite")
            new, audio = _read(self._directory / file.file_name, voice)
            deletion = self._store.registrations.import_speaker(new, audio, file)
            if deletion is not None:
                self._store.remove_files(deletion)
            self.imported.append(voice.name)

    def _remember(self, files: list[ImportedFile]) -> None:
        """Record that these files were read: they are skipped unless they change."""
        with self._store.database.write() as db:
            for file in files:
                stock_files.remember(db, file)

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
                self._remember([file])
        except OSError as exc:
            self.skipped.append((file_name, exc.strerror or str(exc)))


def _read(path: Path, voice: StockVoice) -> tuple[NewSpeaker, DecodedAudio | None]:
    samples, embedding = stock_files.read_tensors(path)
    audio: ReferenceAudio | None = None
    if samples is not None:
        if not voice.sample_rate_hz:
            raise StockFileError("its header has no sample rate")
        audio = ReferenceAudio.of(samples, voice.sample_rate_hz)
    metadata = voice.metadata
    new = NewSpeaker(
        name=voice.name,
        consent=metadata.get("consent", ""),
        audio_sha256=None if audio is None else audio.audio_sha256,
        num_samples=0 if audio is None else audio.num_samples,
        sample_rate_hz=0 if audio is None else audio.sample_rate_hz,
        embedding=embedding,
        ref_text=metadata.get("ref_text"),
        description=metadata.get("speaker_description"),
        mime_type=metadata.get("mime_type"),
        original_filename=metadata.get("original_filename"),
        file_size=voice.file_size,
        created_at=voice.file.created_at,
        taken_over=True,
    )
    return new, None if audio is None else DecodedAudio(audio, ())
