"""Registry, reference audio and disk tier as one storage directory."""

import logging
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.catalogue.record import NewSpeaker, Registered
from vllm_tts_cache.catalogue.registry import Registry
from vllm_tts_cache.catalogue.segment import Segment
from vllm_tts_cache.catalogue.stock_import import import_stock_directory
from vllm_tts_cache.config import Settings
from vllm_tts_cache.errors import TTSCacheError
from vllm_tts_cache.files import storage_errors
from vllm_tts_cache.store.audio_store import AudioStore
from vllm_tts_cache.store.audio_wiring import open_audio
from vllm_tts_cache.store.tiers.disk import DiskTier
from vllm_tts_cache.store.wiring import open_disk

logger = logging.getLogger("vllm.vllm_tts_cache")

PARTIALS_OLDER_THAN_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """What a server finds under ``SPEAKER_SAMPLES_DIR``."""

    directory: Path
    registry: Registry
    audio: AudioStore
    disk: DiskTier

    def register(self, new: NewSpeaker, audio: ReferenceAudio | None) -> Registered:
        """Publish the audio, then commit the row: a row's audio is always there.

        Raises: SpeakerExistsError, SpeakerLimitError, StorageError.
        """
        with self._turn():
            if audio is None:
                return self.registry.register(new)
            was_stored = self.audio.path(audio.audio_sha256) is not None
            self.audio.put(audio, Segment.REGISTERED)
            try:
                return self.registry.register(new)
            except TTSCacheError:
                self._take_back(audio.audio_sha256, was_stored=was_stored)
                raise

    def release(self, audio_sha256: str) -> bool:
        """Drop audio and encodings that no row refers to; False if one does."""
        with self._turn():
            if self.registry.references(audio_sha256):
                return False
            self.audio.delete(audio_sha256)
            self.disk.forget(audio_sha256)
            return True

    def recover(self) -> list[str]:
        """Drop what a process that was killed left behind; returns what it was."""
        # At one moment for all: asking for each file took seconds of a start. What is
        # registered since is not among them, and `release` looks again.
        referenced = self.registry.referenced_audio()
        found = [
            sha
            for sha in self.audio.iter_registered()
            if sha not in referenced and self.release(sha)
        ]
        self.audio.remove_partials(PARTIALS_OLDER_THAN_SECONDS)
        self.disk.remove_partials(PARTIALS_OLDER_THAN_SECONDS)
        return found

    def verify(self) -> list[str]:
        """Return every problem found in registry, audio and encodings."""
        problems = [
            *self.registry.verify(),
            *self.audio.verify(PARTIALS_OLDER_THAN_SECONDS),
            *self.disk.verify(PARTIALS_OLDER_THAN_SECONDS),
        ]
        referenced = self.registry.referenced_audio()
        stored = set(self.audio.iter_registered())
        problems += [f"audio {sha}: no speaker has it" for sha in stored - referenced]
        problems += [f"audio {sha}: not stored" for sha in referenced - stored]
        return sorted(problems)

    def import_stock(self) -> None:
        """Take over voices that stock vLLM-Omni wrote into the same directory."""

        def keep(samples: object, sample_rate_hz: int) -> str:
            audio = ReferenceAudio.of(samples, sample_rate_hz)  # type: ignore[arg-type]
            self.audio.put(audio, Segment.REGISTERED)
            return audio.audio_sha256

        report = import_stock_directory(self.directory, self.registry, keep)
        if report.imported:
            logger.info("Imported %d voices of stock vLLM-Omni.", len(report.imported))
        for file, reason in report.skipped:
            logger.warning("Not imported: %s: %s", file, reason)

    def _take_back(self, audio_sha256: str, *, was_stored: bool) -> None:
        """Undo the publication for a row that was refused; else refusals fill disks."""
        if self.registry.references(audio_sha256):
            return
        if was_stored:  # inline: a running request may need it
            self.audio.demote(audio_sha256)
        else:
            self.audio.delete(audio_sha256)

    def _turn(self) -> FileLock:
        # Else an audio could be released between its publication and the commit of
        # the row that refers to it. The lock dies with its process.
        return FileLock(self.directory / "storage.lock", is_singleton=False)


def open_storage(settings: Settings) -> Storage:
    """Open (or create) the storage directory, importing stock voices once.

    Raises: StorageError, ConfigError.
    """
    directory = settings.samples_dir
    with storage_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
    storage = Storage(
        directory=directory,
        registry=Registry(
            directory / "registry.sqlite3",
            max_speakers=settings.max_uploaded,
            policy=settings.registration_policy,
        ),
        audio=open_audio(settings),
        disk=open_disk(settings),
    )
    storage.import_stock()
    return storage
