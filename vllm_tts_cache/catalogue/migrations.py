"""How an older database becomes one of today, a version at a time."""

from collections.abc import Callable

from sqlalchemy import Connection, inspect, select, text

from vllm_tts_cache.catalogue.dialect import is_postgres
from vllm_tts_cache.catalogue.ids import new_voice_id
from vllm_tts_cache.catalogue.names import search_text
from vllm_tts_cache.catalogue.schema import (
    PER_STATEMENT,
    metadata,
    on_server,
    schema_version,
)
from vllm_tts_cache.catalogue.tenant_usage import FILL
from vllm_tts_cache.errors import StorageError

_BY_ID_AND_AGE = (
    "ALTER TABLE speaker ADD COLUMN speaker_id TEXT",
    "ALTER TABLE speaker ADD COLUMN consent_id TEXT",
    "ALTER TABLE speaker ADD COLUMN language TEXT",
    "ALTER TABLE speaker ADD COLUMN labels_json TEXT",
    "ALTER TABLE speaker ADD COLUMN search_text TEXT",
    "ALTER TABLE speaker ADD COLUMN is_pinned INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE speaker ADD COLUMN expires_at FLOAT",
    "ALTER TABLE speaker ADD COLUMN updated_at FLOAT",
    "ALTER TABLE deletion ADD COLUMN public_id TEXT",
    "CREATE UNIQUE INDEX speaker_public_id ON speaker (speaker_id)",
    "CREATE INDEX speaker_consent ON speaker (consent_id)",
    "CREATE INDEX speaker_expiry ON speaker (expires_at)",
    "CREATE INDEX speaker_age ON speaker (tenant, created_at)",
    "CREATE INDEX speaker_pinned ON speaker (audio_sha256) WHERE is_pinned = 1",
    "CREATE INDEX deletion_public_id ON deletion (public_id)",
    """CREATE TABLE speaker_label (generation BIGINT NOT NULL, label_key TEXT NOT NULL,
    label_value TEXT NOT NULL, PRIMARY KEY (generation, label_key))""",
    "CREATE INDEX speaker_label_value ON speaker_label (label_key, label_value)",
    """CREATE TABLE consent (number INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    consent_id TEXT NOT NULL, tenant TEXT NOT NULL, name TEXT NOT NULL,
    language TEXT NOT NULL, audio_sha256 TEXT NOT NULL, num_samples BIGINT NOT NULL,
    sample_rate_hz INTEGER NOT NULL, created_at FLOAT NOT NULL, UNIQUE (consent_id))""",
    "CREATE INDEX consent_audio ON consent (audio_sha256)",
)
# A process of an older version that was not stopped would write rows without an id, and
# delete what it does not know the owner of. It is told to stop, and changes nothing.
_STOP_IT = "written by a newer vllm-tts-cache; stop this server and upgrade it"
REFUSE_OLDER_WRITERS = (
    f"""CREATE TRIGGER speaker_has_an_id BEFORE INSERT ON speaker
    WHEN NEW.speaker_id IS NULL BEGIN SELECT RAISE(ABORT, '{_STOP_IT}'); END""",
    f"""CREATE TRIGGER deletion_has_an_id BEFORE INSERT ON deletion
    WHEN NEW.name_hash IS NOT NULL AND NEW.public_id IS NULL
    BEGIN SELECT RAISE(ABORT, '{_STOP_IT}'); END""",
)


def _identify_speakers(db: Connection) -> None:
    """Version 2: ids, labels, expiry and consent recordings."""
    for statement in (*_BY_ID_AND_AGE, *REFUSE_OLDER_WRITERS):
        db.execute(text(statement))
    rows = text(
        "SELECT generation, name_key, description FROM speaker"
        " WHERE speaker_id IS NULL LIMIT :limit"
    )
    update = text(
        "UPDATE speaker SET speaker_id = :speaker_id, search_text = :search_text"
        " WHERE generation = :generation"
    )
    while some := db.execute(rows, {"limit": PER_STATEMENT}).all():
        changed = [
            {
                "generation": generation,
                "speaker_id": new_voice_id(),
                "search_text": search_text(name_key, description),
            }
            for generation, name_key, description in some
        ]
        db.execute(update, changed)


def _count_clips(db: Connection) -> None:
    """Version 3: voices of several clips; of one, as all were, nothing is written."""
    db.execute(text("ALTER TABLE speaker ADD COLUMN clip_starts_json TEXT"))


def _name_objects(db: Connection) -> None:
    """Version 4: files that are objects of a bucket."""
    db.execute(text("ALTER TABLE stored_file ADD COLUMN object_name TEXT"))


_TENANTS = (
    """CREATE TABLE tenant_usage (tenant {text} NOT NULL PRIMARY KEY,
    num_voices BIGINT NOT NULL, num_consents BIGINT NOT NULL,
    num_pinned BIGINT NOT NULL, audio_bytes BIGINT NOT NULL)""",
    """CREATE TABLE tenant_audio (tenant {text} NOT NULL, audio_sha256 {text} NOT NULL,
    num_owners BIGINT NOT NULL, num_bytes BIGINT NOT NULL,
    PRIMARY KEY (tenant, audio_sha256))""",
    """CREATE TABLE tenant_encoding (audio_sha256 {text} NOT NULL, kind {text} NOT NULL,
    tenant {text} NOT NULL, is_told INTEGER NOT NULL,
    PRIMARY KEY (audio_sha256, kind, tenant))""",
    "ALTER TABLE deletion ADD COLUMN tenant {text}",
)


def _count_tenants(db: Connection) -> None:
    """Version 5: what each tenant has, and what it has had encoded."""
    kind = 'TEXT COLLATE "C"' if is_postgres(db) else "TEXT"
    for statement in _TENANTS:
        db.execute(text(statement.format(text=kind)))
    for statement in FILL:
        db.execute(text(statement))


_ORDERED_LABELS = (
    "ALTER TABLE speaker_label ADD COLUMN tenant {text}",
    "ALTER TABLE speaker_label ADD COLUMN name_key {text}",
    "ALTER TABLE speaker_label ADD COLUMN created_at {float}",
    "DROP INDEX speaker_label_value",
    """UPDATE speaker_label SET (tenant, name_key, created_at) =
    (SELECT s.tenant, s.name_key, s.created_at FROM speaker s
     WHERE s.generation = speaker_label.generation)""",
    """CREATE INDEX speaker_label_name
    ON speaker_label (tenant, label_key, label_value, name_key)""",
    """CREATE INDEX speaker_label_age
    ON speaker_label (tenant, label_key, label_value, created_at)""",
)


def _order_labels(db: Connection) -> None:
    """Version 6: a page of speakers with a label is read in the order of an index."""
    text_type, float_type = "TEXT", "FLOAT"
    if is_postgres(db):
        text_type, float_type = 'TEXT COLLATE "C"', "DOUBLE PRECISION"
    for statement in _ORDERED_LABELS:
        db.execute(text(statement.format(text=text_type, float=float_type)))


# One step per version, appended to and never edited: a database that exists ran the
# earlier ones. A new database is made as the tables above say, at the last version.
MIGRATIONS: tuple[Callable[[Connection], None], ...] = (
    _identify_speakers,
    _count_clips,
    _name_objects,
    _count_tenants,
    _order_labels,
)
VERSION = 1 + len(MIGRATIONS)


def stored_version(db: Connection) -> int:
    """The version of the schema; 0 if there are no tables."""
    if not inspect(db).has_table(schema_version.name):
        return 0
    return db.execute(select(schema_version.c.version)).scalar_one()


def migrate(
    db: Connection, is_in_use: Callable[[Connection], bool] = lambda _: False
) -> None:
    """Bring the schema up to date, within the caller's transaction.

    Raises:
        StorageError: The database was written by a newer version of this package, or
            by an older one that is still at work.
    """
    version = stored_version(db)
    if version > VERSION:
        raise StorageError(
            f"The voice catalogue was written by a newer vllm-tts-cache (schema "
            f"{version}; this one knows {VERSION}). Upgrade vllm-tts-cache, or set "
            "SPEAKER_SAMPLES_DIR to another directory, and SPEAKER_CATALOGUE_URL, if "
            "it is set, to another database."
        )
    if is_postgres(db):
        on_server.create_all(db)  # what it lacks, of whatever version it is
    if version == 0:
        metadata.create_all(db)
        if not is_postgres(db):  # which has no older writers
            for statement in REFUSE_OLDER_WRITERS:
                db.execute(text(statement))
        db.execute(schema_version.insert().values(version=VERSION))
        return
    if version == VERSION:
        return
    # It would take what it does not know for damaged, or for nobody's.
    if is_in_use(db):
        raise StorageError(
            "A server of an earlier vllm-tts-cache is at work on this voice catalogue; "
            "nothing was changed. Stop that server, then start this one."
        )
    for step in MIGRATIONS[version - 1 :]:
        step(db)
    db.execute(schema_version.update().values(version=VERSION))
