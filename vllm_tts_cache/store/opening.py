"""Opens the store that the settings describe; the one place that puts it together."""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_tts_cache.audio.decode import DecodedAudio
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.catalogue.records import NewSpeaker, Segment
from vllm_tts_cache.config import Settings, allows_plain_http
from vllm_tts_cache.errors import ConfigError, NoCatalogueError
from vllm_tts_cache.files import make_directory, storage_errors
from vllm_tts_cache.logs import encodable
from vllm_tts_cache.store import binding, bucket_blobs
from vllm_tts_cache.store.blobs import Blobs
from vllm_tts_cache.store.bucket_blobs import BucketBlobs
from vllm_tts_cache.store.catalogue import (
    FILE_NAME,
    Catalogue,
    open_catalogue,
    open_existing_catalogue,
)
from vllm_tts_cache.store.directory import DirectoryBlobs, StoreDirectory
from vllm_tts_cache.store.speaker_store import SpeakerStore
from vllm_tts_cache.store.stock_files import ImportedFile
from vllm_tts_cache.store.stock_import import ImportReport, import_stock_directory
from vllm_tts_cache.store.writer import DiskBudgets

if TYPE_CHECKING:
    from vllm_tts_cache.store.bucket import Bucket

logger = logging.getLogger("vllm.vllm_tts_cache")


def open_store(settings: Settings, *, import_stock: bool = True) -> SpeakerStore:
    """Open ``SPEAKER_SAMPLES_DIR``, and make it if it is not there.

    Args:
        settings: Where, and how much.
        import_stock: Whether to register the voices of stock vLLM-Omni that are new
            there. A worker leaves that to the API process.

    Raises:
        StorageError: It cannot be opened, or is of another version. What was imported
            stays; the next opening goes on from there.
    """
    directory = settings.samples_dir
    with storage_errors(directory):
        make_directory(directory)
    catalogue = _open_catalogue(directory, settings.catalogue_url)
    files = StoreDirectory(directory)
    with _closed_on_error(catalogue):
        blobs = _blobs(settings, files, catalogue, binds=True)
    store = SpeakerStore(
        files,
        catalogue,
        blobs,
        budgets=_budgets(settings),
        lease_seconds=settings.catalogue_grace_seconds,
        max_speakers=settings.max_uploaded,
        policy=settings.registration_policy,
        needs_recording=settings.consent == "recording",
    )
    if import_stock and not blobs.is_remote:
        with _closed_on_error(catalogue):
            import_stock_voices(store)
    return store


def open_existing(settings: Settings) -> SpeakerStore:
    """Open ``SPEAKER_SAMPLES_DIR`` as it is, to look at it; nothing is written.

    Raises:
        NoCatalogueError: No server of this version has stored voices there.
        ConfigError: The directory or the catalogue belongs to another.
        StorageError: It cannot be read.
    """
    directory, url = settings.samples_dir, settings.catalogue_url
    if not url:
        binding.check_file(directory)
    # A mistyped path would look right if it were made.
    if not (url or (directory / FILE_NAME).is_file()):
        raise NoCatalogueError(
            f"SPEAKER_SAMPLES_DIR={str(directory)!r}: no server of this version has "
            "stored voices there. Set SPEAKER_SAMPLES_DIR to the directory that the "
            "server uses, or start the server once."
        )
    files = StoreDirectory(directory)
    catalogue = open_existing_catalogue(directory, url)
    with _closed_on_error(catalogue):
        blobs = _blobs(settings, files, catalogue, binds=False)
    return SpeakerStore(
        files,
        catalogue,
        blobs,
        budgets=_budgets(settings),
        lease_seconds=settings.catalogue_grace_seconds,
        max_speakers=settings.max_uploaded,
        policy=settings.registration_policy,
        needs_recording=settings.consent == "recording",
    )


def _open_catalogue(directory: Path, url: str) -> Catalogue:
    if not url:
        binding.check_file(directory)
        catalogue = open_catalogue(directory)
        binding.mark(directory)
        return catalogue
    binding.check_server(directory)
    catalogue = open_catalogue(directory, url)
    with _closed_on_error(catalogue):
        binding.mark(directory)
    return catalogue


def _blobs(
    settings: Settings, files: StoreDirectory, catalogue: Catalogue, *, binds: bool
) -> Blobs:
    """See that the catalogue is of these files, or bind it to them if it is of none."""
    database = catalogue.database
    if settings.store_url:
        bucket = _bucket(settings.store_url)
        bind = bucket_blobs.bind if binds else bucket_blobs.check
        return BucketBlobs(
            files,
            database,
            bucket,
            max_bytes=settings.copies_max_bytes,
            catalogue_id=bind(bucket, database),
        )
    if settings.catalogue_url:
        (binding.bind if binds else binding.check)(files.root, database)
    return DirectoryBlobs(files, database)


def _bucket(url: str) -> "Bucket":
    try:
        from vllm_tts_cache.store.bucket import Bucket
    except ImportError as exc:
        raise ConfigError(
            "SPEAKER_STORE_URL is set, and what asks object stores is missing: "
            f"pip install 'vllm-tts-cache[fleet]' ({exc})"
        ) from exc
    return Bucket(url, is_plain=allows_plain_http())


@contextmanager
def _closed_on_error(catalogue: Catalogue) -> Generator[None, None, None]:
    try:
        yield
    except BaseException:
        catalogue.close()
        raise


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
    if report.skipped:
        # The files are called after voices, and reasons quote what is in them.
        message = (
            "%d files of stock vLLM-Omni are not imported; at DEBUG it says which."
        )
        logger.warning(message, len(report.skipped))
    for file, reason in report.skipped:
        logger.debug("Not imported: %s: %s", encodable(file), encodable(reason))
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
