"""The two ends of a migration: opened, and refused where they are not fit for it."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from sqlalchemy import exists, func, select

from vllm_tts_cache.catalogue import deletions, moves, schema
from vllm_tts_cache.catalogue.catalogue import FILE_NAME
from vllm_tts_cache.catalogue.moves import Move
from vllm_tts_cache.catalogue.record import AUDIO_KIND
from vllm_tts_cache.config import Settings
from vllm_tts_cache.errors import ConfigError, StorageError
from vllm_tts_cache.files import PARTIAL_PREFIX, storage_errors
from vllm_tts_cache.store import binding, home, takeover
from vllm_tts_cache.store.opening import open_existing, open_store
from vllm_tts_cache.store.participation import is_in_use
from vllm_tts_cache.store.speaker_store import SpeakerStore

# What opening a directory makes in it; a migration that was killed then is begun anew.
_OURS = (FILE_NAME, binding.CATALOGUE_ID, home.FILE_NAME, PARTIAL_PREFIX)
_OUR_FOLDERS = {"participants", "partial", "store", "trash", "quarantine", "lost+found"}
_OWNERS = schema.speaker, schema.consent


@contextmanager
def open_source(settings: Settings) -> Generator[SpeakerStore, None, None]:
    """Open it as it is, to read it.

    Raises:
        ConfigError: It is in use, or something of it is not finished.
        StorageError: It cannot be read.
    """
    store = open_existing(settings)
    try:
        check_unused(store)
        _check_finished(store)
        yield store
    finally:
        store.close()


@contextmanager
def open_target(settings: Settings) -> Generator[SpeakerStore, None, None]:
    """Open it, made if need be, for nobody but us; what is there is not touched.

    Raises:
        ConfigError: It is in use, or has files of something else.
        StorageError: It cannot be opened.
    """
    if not settings.store_url:
        _check_ours(settings.samples_dir)
    store = open_store(settings, import_stock=False, is_filled=True)
    with ExitStack() as opened:
        opened.callback(store.close)
        check_unused(store)
        opened.enter_context(_turn(store))
        yield store


def check_unused(store: SpeakerStore) -> None:
    """Refuse a store that a server has open.

    Raises: ConfigError, StorageError.
    """
    if is_used(store):
        raise ConfigError(
            f"{place_of(store)} is in use. Stop its servers first; one that was killed "
            "counts as one until its lease is over "
            "(SPEAKER_CATALOGUE_GRACE_SECONDS)."
        )


def is_used(store: SpeakerStore) -> bool:
    """Whether a server has it open. Raises: StorageError."""
    is_file = not store.catalogue.database.backend.has_leases
    return bool(store.num_alive() or (is_file and is_in_use(store.directory)))


def identity(store: SpeakerStore) -> str:
    """What tells a store from any other."""
    database = store.catalogue.database
    if database.backend.has_leases:
        with database.read() as db:
            bound = binding.bound_to(db)
        return "" if bound is None else bound[0]
    return home.home_of(store.directory).id


def place_of(store: SpeakerStore) -> str:
    """Where it is, for people; without a password."""
    database = store.catalogue.database
    where = store.home.place if store.blobs.is_remote else str(store.directory)
    return f"{database.where} with {where}" if database.backend.has_leases else where


def check_target(source: SpeakerStore, target: SpeakerStore) -> Move | None:
    """Refuse a target that has anything but what this migration has copied.

    Returns:
        What was done of it before.

    Raises: ConfigError, StorageError.
    """
    if not (source_id := identity(source)):
        raise StorageError(f"{place_of(source)} has no {home.FILE_NAME}.")
    if source_id == identity(target):
        raise ConfigError("--from and --to are the same store.")
    with target.catalogue.database.read() as db:
        move = moves.find(db)
        tables = (*_OWNERS, schema.stored_file)
        is_empty = not any(db.execute(select(t).limit(1)).first() for t in tables)
    if move is None and not is_empty:
        raise ConfigError(
            f"{place_of(target)} is not empty: voices are migrated into an empty "
            "store. Take single voices along with `vllm-tts-cache voices export` and "
            "`import`."
        )
    if move is not None and move.source_id != source_id:
        raise ConfigError(
            f"{place_of(target)} has what is migrated from {move.place}, which is not "
            f"{place_of(source)}. Migrate into an empty store."
        )
    return move


def _check_finished(store: SpeakerStore) -> None:
    database = store.catalogue.database
    with database.read() as db:
        num_deletions = len(deletions.unfinished(db))
        num_lost = sum(
            db.execute(
                select(func.count())
                .select_from(table)
                .where(table.c.audio_sha256.is_not(None))
                .where(
                    ~exists().where(
                        schema.stored_file.c.audio_sha256 == table.c.audio_sha256,
                        schema.stored_file.c.kind == AUDIO_KIND,
                    )
                )
            ).scalar_one()
            for table in _OWNERS
        )
    is_pending = not store.blobs.is_remote and takeover.is_pending(store.directory)
    if num_deletions or is_pending:
        raise ConfigError(
            f"{place_of(store)} has {num_deletions} deletions that are not finished, "
            "or voices of an earlier version: run `vllm-tts-cache gc` there first."
        )
    if num_lost:
        raise ConfigError(
            f"{num_lost} voices or consent recordings of {place_of(store)} have lost "
            "their audio (`vllm-tts-cache verify` says which). Register them again, or "
            "delete them."
        )


def _check_ours(directory: Path) -> None:
    names: list[str] = []
    with storage_errors(directory), suppress(FileNotFoundError):
        names = [path.name for path in directory.iterdir()]
    foreign = [
        name
        for name in names
        if not name.startswith(_OURS) and name not in _OUR_FOLDERS
    ]
    if foreign:
        raise ConfigError(
            f"{directory} has files of something else ({sorted(foreign)[0]!r}, ...). "
            "Name a directory that is empty, or is not there."
        )


@contextmanager
def _turn(store: SpeakerStore) -> Generator[None, None, None]:
    """Be the one who fills it; it ends with the process."""
    database = store.catalogue.database
    if not database.backend.has_leases:
        store.join()
        if store.num_alive():
            raise _busy(store)
        yield  # `close` leaves
        return
    with database.alone() as db:
        if not moves.take_turn(db):
            raise _busy(store)
        try:
            yield
        finally:
            with suppress(StorageError):
                moves.give_turn(db)


def _busy(store: SpeakerStore) -> ConfigError:
    return ConfigError(f"Another process is migrating into {place_of(store)}.")
