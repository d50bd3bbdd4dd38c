"""Opens the store that the settings describe; the one place that puts it together."""

import logging

from vllm_tts_cache.audio.decode import DecodedAudio
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.catalogue.catalogue import (
    FILE_NAME,
    open_catalogue,
    open_existing_catalogue,
)
from vllm_tts_cache.catalogue.imports import ImportedFile
from vllm_tts_cache.catalogue.record import NewSpeaker, Segment
from vllm_tts_cache.catalogue.stock_import import (
    ImportReport,
    import_stock_directory,
)
from vllm_tts_cache.config import Settings
from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.files import make_directory, storage_errors
from vllm_tts_cache.store import home, takeover
from vllm_tts_cache.store.directory import StoreDirectory
from vllm_tts_cache.store.eviction import DiskBudgets
from vllm_tts_cache.store.speaker_store import SpeakerStore

logger = logging.getLogger("vllm.vllm_tts_cache")


def open_store(settings: Settings, *, import_stock: bool = True) -> SpeakerStore:
    """Open ``SPEAKER_SAMPLES_DIR``, made, migrated and taken over if need be.

    Args:
        settings: Where, and how much.
        import_stock: Whether to register the voices of stock vLLM-Omni that are new
            there. A worker leaves that to the API process.

    Raises:
        StorageError: Some of it failed. What was imported or taken over stays; the
            next opening goes on from there.
    """
    directory = settings.samples_dir
    with storage_errors(directory):
        make_directory(directory)
    catalogue = open_catalogue(directory)
    home.mark(directory)
    files = StoreDirectory(directory)
    takeover.take_over(files, catalogue.database)
    store = SpeakerStore(
        files,
        catalogue,
        budgets=_budgets(settings),
        max_speakers=settings.max_uploaded,
        policy=settings.registration_policy,
    )
    if import_stock:
        import_stock_voices(store)
    return store


def open_existing(settings: Settings) -> SpeakerStore:
    """Open ``SPEAKER_SAMPLES_DIR`` as it is, to look at it; nothing is written.

    Raises:
        ConfigError: No server of this version has stored voices there.
        StorageError: It cannot be read.
    """
    directory = settings.samples_dir
    # A mistyped path would look right if it were made.
    if not (directory / FILE_NAME).is_file():
        raise ConfigError(
            f"SPEAKER_SAMPLES_DIR={str(directory)!r}: no server of this version has "
            "stored voices there. Set SPEAKER_SAMPLES_DIR to the directory that the "
            "server uses, or start the server once."
        )
    return SpeakerStore(
        StoreDirectory(directory),
        open_existing_catalogue(directory),
        budgets=_budgets(settings),
        max_speakers=settings.max_uploaded,
        policy=settings.registration_policy,
    )


def import_stock_voices(store: SpeakerStore) -> ImportReport:
    """Register the voices of stock vLLM-Omni that are new in the store's directory.

    Raises:
        StorageError: What was imported so far stays; the next import goes on.
    """

    def register(
        new: NewSpeaker, reference: ReferenceAudio | None, file: ImportedFile
    ) -> str | None:
        audio = None if reference is None else DecodedAudio(reference, ())
        refusal, deletion = store.import_speaker(new, audio, file)
        if deletion is not None:
            store.remove_files(deletion)
        return refusal

    report = import_stock_directory(store.directory, store.catalogue, register)
    if report.imported:
        logger.info("Imported %d voices of stock vLLM-Omni.", len(report.imported))
    for file, reason in report.skipped:
        logger.warning("Not imported: %s: %s", _printable(file), _printable(reason))
    return report


def _budgets(settings: Settings) -> DiskBudgets:
    inline_bytes = int(settings.disk_max_bytes * settings.inline_share)
    return DiskBudgets(
        audio={
            Segment.REGISTERED: settings.audio_max_bytes,
            Segment.INLINE: settings.inline_audio_max_bytes,
        },
        encodings={
            Segment.REGISTERED: settings.disk_max_bytes - inline_bytes,
            Segment.INLINE: inline_bytes,
        },
    )


def _printable(text: str) -> str:
    """Spell out what is no character: a file's name may be any bytes, a log may not."""
    return text.encode(errors="backslashreplace").decode()
