"""Opens the store that the settings describe; only this module assembles it."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from vllm_tts_cache.catalogue.database import Backend, Database
from vllm_tts_cache.catalogue.sqlite import FILE_NAME, SqliteFile
from vllm_tts_cache.config import Settings, allows_plain_http
from vllm_tts_cache.errors import ConfigError, NoCatalogueError
from vllm_tts_cache.files import make_directory, shared_file_system, storage_errors
from vllm_tts_cache.logs import logger
from vllm_tts_cache.store import binding
from vllm_tts_cache.store.binding import StoreId
from vllm_tts_cache.store.blobs import BucketOwner
from vllm_tts_cache.store.directory import (
    DirectoryOwner,
    DirectoryReader,
    StoreDirectory,
)
from vllm_tts_cache.store.reading import BucketReader, Copies
from vllm_tts_cache.store.speaker_store import SpeakerStore
from vllm_tts_cache.store.stock_import import import_stock_voices


def open_store(settings: Settings, *, import_stock: bool = True) -> SpeakerStore:
    """Open ``SPEAKER_SAMPLES_DIR``, and make it if it does not exist.

    Unless there is a bucket, ``import_stock`` registers new voices of stock vLLM-Omni;
    a worker leaves that to the API process.

    Raises: StorageError: The store is of another version, or fails. Voices that
        were imported stay; the next opening goes on from there.
    """
    directory = settings.samples_dir
    with storage_errors(directory):
        make_directory(directory)
    database = open_catalogue(directory, settings.catalogue_url)
    with _closed_on_error(database):
        store = _opened(settings, database, binds=True)
        if import_stock and store.copies is None:
            import_stock_voices(store)
    return store


def open_existing(settings: Settings) -> SpeakerStore:
    """Open ``SPEAKER_SAMPLES_DIR`` for reading; makes no directory and no catalogue.

    Raises:
        NoCatalogueError: No server of this version has stored voices there.
        ConfigError: The directory or the catalogue is bound to another one.
        StorageError: The catalogue cannot be read.
    """
    directory, url = settings.samples_dir, settings.catalogue_url
    if not url:
        binding.check_file(directory)
        # Not made here: a mistyped path would then look right.
        if not (directory / FILE_NAME).is_file():
            raise NoCatalogueError(
                f"SPEAKER_SAMPLES_DIR={str(directory)!r}: no server of this version "
                "has stored voices there. Set SPEAKER_SAMPLES_DIR to the directory "
                "that the server uses, or start the server once."
            )
    database = Database(_backend(directory, url), directory)
    with _closed_on_error(database):
        database.check()
        return _opened(settings, database, binds=False)


def open_catalogue(directory: Path, url: str = "") -> Database:
    """Open the catalogue of an existing directory, and make it if there is none.

    With a URL it is in that PostgreSQL database, else in a file of the directory.

    Raises: StorageError, ConfigError.
    """
    (binding.check_server if url else binding.check_file)(directory)
    database = Database(_backend(directory, url), directory)
    with _closed_on_error(database):
        database.prepare()
        binding.mark(directory)
    return database


def _backend(directory: Path, url: str) -> Backend:
    if not url:
        return SqliteFile(directory / FILE_NAME)
    with _of_fleet("SPEAKER_CATALOGUE_URL is set, and the driver"):
        from vllm_tts_cache.catalogue.postgres import PostgresServer
    return PostgresServer(url)


def _opened(settings: Settings, database: Database, *, binds: bool) -> SpeakerStore:
    directory = settings.samples_dir
    files = StoreDirectory(directory)
    is_file = not settings.catalogue_url
    file_system = shared_file_system(directory) if is_file else None
    if file_system is not None:
        logger.warning(
            "SPEAKER_SAMPLES_DIR=%s is on %s. The catalogue needs one host and a "
            "local file system: SQLite's log is shared through memory. Do not "
            "start a second host on it, or keep the catalogue on PostgreSQL "
            "(SPEAKER_CATALOGUE_URL).",
            directory,
            file_system,
        )
    is_local = is_file and file_system is None
    if settings.store_url:
        with _of_fleet("SPEAKER_STORE_URL is set, and the client for it"):
            from vllm_tts_cache.store.bucket import Bucket
        bucket = Bucket(settings.store_url, is_plain=allows_plain_http())
        bind = binding.bind_bucket if binds else binding.check_bucket
        store_id = StoreId(id=bind(bucket, database), place=bucket.where)
        copies = Copies(files, database, settings.copies_max_bytes)
        reader = BucketReader(database, bucket, copies)
        blobs = BucketOwner(database, bucket, copies)
    else:
        if settings.catalogue_url:
            (binding.bind if binds else binding.check)(directory, database)
        store_id = binding.store_id_of(directory)
        reader, blobs = DirectoryReader(files), DirectoryOwner(files)
    return SpeakerStore(
        settings, database, reader, blobs, store_id=store_id, is_local=is_local
    )


@contextmanager
def _of_fleet(what: str) -> Generator[None, None, None]:
    """Say how to install a package of the extra ``fleet`` that is imported inside."""
    try:
        yield
    except ImportError as exc:
        install = "pip install 'vllm-tts-cache[fleet]'"
        raise ConfigError(f"{what} is missing: {install} ({exc})") from exc


@contextmanager
def _closed_on_error(database: Database) -> Generator[None, None, None]:
    try:
        yield
    except BaseException:
        database.close()
        raise
