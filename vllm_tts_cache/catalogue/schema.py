"""The tables of the catalogue, and statements that differ between its databases."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import (
    DDL,
    BigInteger,
    CheckConstraint,
    Column,
    Connection,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    event,
    inspect,
    select,
    text,
)

# Version of the tables below; a catalogue of another version is not opened.
VERSION = 4

metadata = MetaData()

# Compared and ordered by code point, as SQLite does it: a server's database would
# otherwise use the order of its locale.
TEXT = Text().with_variant(Text(collation="C"), "postgresql")

# SQLite before 3.32 takes 999 parameters at most.
PER_STATEMENT = 500
# Generations that one statement looks through, in a quarter of a second: over a million
# voices it would take longer than the server lets a statement take.
LOOKED_AT = 20_000


def _numbered(name: str) -> "Column[Any]":
    # An integer of SQLite has 64 bits; only INTEGER may number its rows by itself.
    return Column(name, BigInteger().with_variant(Integer, "sqlite"), primary_key=True)


def _filled(type_: Any, *names: str) -> "list[Column[Any]]":
    """Return columns that are never NULL."""
    return [Column(name, type_, nullable=False) for name in names]


schema_version = Table(
    "schema_version", metadata, Column("version", Integer, nullable=False)
)

# AUTOINCREMENT never hands out a number twice, those of deleted rows included. The
# embedding is last, so that reading the other columns stays on one page.
speaker = Table(
    "speaker",
    metadata,
    _numbered("generation"),
    *_filled(TEXT, "tenant", "name_key", "name"),
    Column("audio_sha256", TEXT),
    Column("num_samples", BigInteger, nullable=False),
    Column("sample_rate_hz", Integer, nullable=False),
    Column("ref_text", TEXT),
    Column("consent", TEXT, nullable=False),
    Column("description", TEXT),
    Column("mime_type", TEXT),
    Column("original_filename", TEXT),
    Column("file_size", BigInteger),
    Column("created_at", Float, nullable=False),
    Column("speaker_id", TEXT, nullable=False),
    Column("consent_id", TEXT),
    Column("language", TEXT),
    Column("labels_json", TEXT),
    Column("search_text", TEXT, nullable=False),
    Column("expires_at", Float),
    Column("updated_at", Float),
    Column("clip_starts_json", Text),
    Column("extras_json", TEXT),
    Column("embedding", LargeBinary),
    Column("precompute", Integer, nullable=False, default=1),
    UniqueConstraint("tenant", "name_key"),
    CheckConstraint("(audio_sha256 IS NULL) <> (embedding IS NULL)"),
    Index("speaker_audio", "audio_sha256"),
    Index("speaker_public_id", "speaker_id", unique=True),
    Index("speaker_consent", "consent_id"),
    Index("speaker_expiry", "expires_at"),
    Index("speaker_age", "tenant", "created_at"),
    sqlite_autoincrement=True,
)

# The labels once more, folded, to search by. They are deleted with their speaker's row,
# and repeat the columns that lists are ordered by: an index reads a page, however many
# speakers have the label.
speaker_label = Table(
    "speaker_label",
    metadata,
    Column("generation", BigInteger, primary_key=True),
    Column("label_key", TEXT, primary_key=True),
    *_filled(TEXT, "label_value", "tenant", "name_key"),
    Column("created_at", Float, nullable=False),
    Index("speaker_label_name", "tenant", "label_key", "label_value", "name_key"),
    Index("speaker_label_age", "tenant", "label_key", "label_value", "created_at"),
)

# Recordings in which a person consents to being cloned; their audio is stored as that
# of speakers is.
consent = Table(
    "consent",
    metadata,
    _numbered("number"),
    Column("consent_id", TEXT, nullable=False, unique=True),
    *_filled(TEXT, "tenant", "name", "language", "audio_sha256"),
    Column("num_samples", BigInteger, nullable=False),
    Column("sample_rate_hz", Integer, nullable=False),
    Column("created_at", Float, nullable=False),
    Index("consent_audio", "audio_sha256"),
    sqlite_autoincrement=True,
)

# An artifact is "audio" or an encoder's fingerprint. ``used_at`` orders the rows of one
# segment by their last use: microseconds of Unix time, but more than all before.
# ``object_name`` is its name in an object store; NULL for a file of a directory.
# ``is_suspect``: the last read of the audio found it missing or damaged.
stored_file = Table(
    "stored_file",
    metadata,
    _numbered("id"),
    *_filled(TEXT, "audio_sha256", "artifact", "segment"),
    Column("is_audio", Integer, nullable=False),
    *_filled(BigInteger, "num_bytes", "used_at"),
    Column("created_at", Float, nullable=False),
    Column("object_name", TEXT),
    Column("is_suspect", Integer, nullable=False, default=0),
    UniqueConstraint("audio_sha256", "artifact"),
    Index("stored_file_use", "segment", "is_audio", "used_at"),
    sqlite_autoincrement=True,
)

# Encodings of stored audio whose last encode failed. ``next_try``: when another one is
# worth while, in Unix seconds of the database.
failed_encode = Table(
    "failed_encode",
    metadata,
    Column("audio_sha256", TEXT, primary_key=True),
    Column("artifact", TEXT, primary_key=True),
    Column("reason", TEXT, nullable=False),
    Column("num_attempts", Integer, nullable=False),
    Column("next_try", Float, nullable=False),
    Index("failed_encode_try", "next_try"),
)

# Sums over stored_file, updated in the same transactions.
usage = Table(
    "usage",
    metadata,
    Column("segment", TEXT, primary_key=True),
    Column("is_audio", Integer, primary_key=True),
    *_filled(BigInteger, "num_files", "num_bytes"),
)

# Sums over each tenant's voices and consent recordings. A clip that a tenant has more
# than once counts once, and one that several tenants have counts for each.
tenant_usage = Table(
    "tenant_usage",
    metadata,
    Column("tenant", TEXT, primary_key=True),
    *_filled(BigInteger, "num_voices", "num_consents", "audio_bytes"),
)

# How many voices and consent recordings (owners) of a tenant have an audio.
tenant_audio = Table(
    "tenant_audio",
    metadata,
    Column("tenant", TEXT, primary_key=True),
    Column("audio_sha256", TEXT, primary_key=True),
    *_filled(BigInteger, "num_owners", "num_bytes"),
)

# The name is hashed: of a deleted voice only its random id is kept as it was.
# Both are NULL for the audio of a voice that was replaced: no DELETE looks it up. The
# address is cleared when the deletion is finished.
deletion = Table(
    "deletion",
    metadata,
    _numbered("id"),
    Column("audio_sha256", TEXT),
    Column("name_hash", TEXT),
    Column("requested_at", Float, nullable=False),
    Column("files_removed", Integer, nullable=False),
    Column("public_id", TEXT),
    Column("tenant", TEXT, nullable=False),
    Index("deletion_name", "name_hash"),
    Index("deletion_public_id", "public_id"),
    Index("deletion_files", "files_removed"),
    sqlite_autoincrement=True,
)

participant = Table(
    "participant",
    metadata,
    Column("id", TEXT, primary_key=True),
    Column("joined_at", Float, nullable=False),
)

# A participant that has still to delete a deletion's audio from its memory.
confirmation = Table(
    "confirmation",
    metadata,
    Column("participant_id", TEXT, ForeignKey("participant.id"), primary_key=True),
    Column("deletion_id", BigInteger, ForeignKey("deletion.id"), primary_key=True),
    Index("confirmation_deletion", "deletion_id"),
)

# The key of the servers' salts and signatures, see `Database.secret`. One row at most.
secret = Table(
    "secret",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("key", LargeBinary, nullable=False),
)

# Requests that were done, by their ``Idempotency-Key``. Both hashes are over the key,
# which is not stored, so they say nothing of a voice that is deleted.
done_request = Table(
    "done_request",
    metadata,
    Column("key_hash", TEXT, primary_key=True),
    *_filled(TEXT, "request_hash", "speaker_id"),
    Column("done_at", Float, nullable=False),
    Index("done_request_time", "done_at"),
)

# Files of stock vLLM-Omni that were looked at. ``name_key`` of a deleted voice is
# the hash of its name; ``deletion_id``: the deletion that has to remove the file.
imported_file = Table(
    "imported_file",
    metadata,
    Column("file_name", TEXT, primary_key=True),
    *_filled(BigInteger, "mtime_ns", "size"),
    Column("name_key", TEXT),
    Column("created_at", Float),
    Column("deleted_at", Float),
    Column("deletion_id", BigInteger),
    Index("imported_file_name", "name_key"),
    Index("imported_file_deletion", "deletion_id"),
)

# Tables that only a catalogue on a server has, which several machines reach.
on_server = MetaData()

# The directory or bucket that has the files of this catalogue. One row at most.
binding = Table(
    "binding",
    on_server,
    Column("catalogue_id", TEXT, primary_key=True),
    *_filled(TEXT, "directory_id", "place"),
)

# Until when a participant's lease lasts, in Unix seconds of the server's clock, and for
# how many seconds each renewal extends it.
lease = Table(
    "lease",
    on_server,
    Column("participant_id", TEXT, primary_key=True),
    *_filled(Float, "until", "seconds"),
)

# Objects of the bucket that no row of ``stored_file`` names. One may be removed from
# ``removable_from`` on, in Unix seconds of the server's clock.
loose_object = Table(
    "loose_object",
    on_server,
    Column("object_name", TEXT, primary_key=True),
    Column("audio_sha256", TEXT, nullable=False),
    Column("removable_from", Float, nullable=False),
    Index("loose_object_audio", "audio_sha256"),
    Index("loose_object_time", "removable_from"),
)

# Who holds the turn to encode a key, and until when by the server's clock.
encode_turn = Table(
    "encode_turn",
    on_server,
    Column("key_digest", TEXT, primary_key=True),
    Column("holder", TEXT, nullable=False),
    Column("until", Float, nullable=False),
)

# Since when leases, of any participant, have been renewed without a gap; by the same
# clock. One row at most.
renewals = Table(
    "renewals",
    on_server,
    Column("number", Integer, primary_key=True, autoincrement=False),
    *_filled(Float, "began_at", "last_at"),
)


def generation(ondelete: str, **options: Any) -> "Column[Any]":
    """Return the column of a feature's table with the generation of a row's speaker.

    Nothing that deletes a speaker has to know of these tables: ``ondelete`` is what
    PostgreSQL does to the row then; see also `on_sqlite`.
    """
    of_speaker = ForeignKey(speaker.c.generation, ondelete=ondelete)
    return Column("generation", BigInteger, of_speaker, **options)


def on_sqlite(table: Table, change: str) -> None:
    """Have SQLite, which enforces no foreign keys here, change a speaker's row as well.

    ``change`` is ``DELETE FROM table`` or ``UPDATE table SET ...``.
    """
    trigger = (
        f"CREATE TRIGGER {table.name}_follows AFTER DELETE ON speaker BEGIN "
        f"{change} WHERE generation = OLD.generation; END"
    )
    event.listen(table, "after_create", DDL(trigger).execute_if(dialect="sqlite"))


def stored_version(db: Connection) -> int:
    """Return the version of the stored tables; 0 if there are none."""
    if not inspect(db).has_table(schema_version.name):
        return 0
    return db.execute(select(schema_version.c.version)).scalar_one()


def create(db: Connection) -> None:
    """Make the tables in an empty database, within the caller's transaction."""
    metadata.create_all(db)
    if is_postgres(db):
        on_server.create_all(db)
    db.execute(schema_version.insert().values(version=VERSION))


def slices(values: Sequence[str]) -> Iterator[Sequence[str]]:
    """Cut a list of parameters into parts, of as many as a statement may have."""
    for start in range(0, len(values), PER_STATEMENT):
        yield values[start : start + PER_STATEMENT]


def is_postgres(db: Connection) -> bool:
    """Whether the connection is to PostgreSQL; else it is to SQLite."""
    return db.dialect.name == "postgresql"


def now(db: Connection) -> float:
    """Return Unix seconds by the server's clock; with SQLite, by this machine's."""
    if not is_postgres(db):
        return time.time()
    query = text("SELECT date_part('epoch', clock_timestamp())")
    return float(db.execute(query).scalar_one())


def check_turn(db: Connection) -> None:
    """Check that a write transaction still has its turn, before it removes a file.

    The server takes the turn from a process that was frozen for too long. Others may
    then change the rows that it has read, so it must not act on them.

    Raises: DBAPIError.
    """
    if is_postgres(db):
        db.execute(text("SELECT 1"))


def problems(db: Connection) -> list[str]:
    """Return what is wrong with SQLite's file, reading all of it; [] for a server."""
    if is_postgres(db):
        return []
    lines = db.execute(text("PRAGMA integrity_check")).scalars()
    return [line for line in lines if line != "ok"]
