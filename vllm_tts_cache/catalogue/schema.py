"""The tables of the catalogue, and how an older database becomes one of today."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sqlalchemy import (
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
    inspect,
    select,
)

from vllm_tts_cache.errors import StorageError

metadata = MetaData()

# SQLite before 3.32 takes 999 parameters at most.
_PER_STATEMENT = 500


def _numbered(name: str) -> "Column[Any]":
    # An integer of SQLite has 64 bits; only INTEGER may number its rows by itself.
    return Column(name, BigInteger().with_variant(Integer, "sqlite"), primary_key=True)


schema_version = Table(
    "schema_version", metadata, Column("version", Integer, nullable=False)
)

# AUTOINCREMENT never hands out a number twice, those of deleted rows included. The
# embedding is last, so that reading the other columns stays on one page.
speaker = Table(
    "speaker",
    metadata,
    _numbered("generation"),
    Column("tenant", Text, nullable=False),
    Column("name_key", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("audio_sha256", Text),
    Column("num_samples", BigInteger, nullable=False),
    Column("sample_rate_hz", Integer, nullable=False),
    Column("ref_text", Text),
    Column("consent", Text, nullable=False),
    Column("description", Text),
    Column("mime_type", Text),
    Column("original_filename", Text),
    Column("file_size", BigInteger),
    Column("created_at", Float, nullable=False),
    Column("embedding", LargeBinary),
    UniqueConstraint("tenant", "name_key"),
    CheckConstraint("(audio_sha256 IS NULL) <> (embedding IS NULL)"),
    Index("speaker_audio", "audio_sha256"),
    sqlite_autoincrement=True,
)

# A kind is "audio" or an encoder's fingerprint. ``used_at`` orders the rows of one
# segment by their last use: microseconds of Unix time, but never less than before.
stored_file = Table(
    "stored_file",
    metadata,
    _numbered("id"),
    Column("audio_sha256", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("segment", Text, nullable=False),
    Column("is_audio", Integer, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("used_at", BigInteger, nullable=False),
    Column("created_at", Float, nullable=False),
    UniqueConstraint("audio_sha256", "kind"),
    Index("stored_file_use", "segment", "is_audio", "used_at"),
    sqlite_autoincrement=True,
)

# What stored_file adds up to, kept in the same transactions.
usage = Table(
    "usage",
    metadata,
    Column("segment", Text, primary_key=True),
    Column("is_audio", Integer, primary_key=True),
    Column("num_files", BigInteger, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
)

# The name is hashed: nothing of a deleted voice is kept. NULL for the audio of a
# voice that was replaced, which nobody asks for. The address goes with the files.
deletion = Table(
    "deletion",
    metadata,
    _numbered("id"),
    Column("audio_sha256", Text),
    Column("name_hash", Text),
    Column("requested_at", Float, nullable=False),
    Column("files_removed", Integer, nullable=False),
    Index("deletion_name", "name_hash"),
    Index("deletion_files", "files_removed"),
    sqlite_autoincrement=True,
)

participant = Table(
    "participant",
    metadata,
    Column("id", Text, primary_key=True),
    Column("joined_at", Float, nullable=False),
)

# A participant that has still to drop what it remembers of a deleted voice.
confirmation = Table(
    "confirmation",
    metadata,
    Column("participant_id", Text, ForeignKey("participant.id"), primary_key=True),
    Column("deletion_id", BigInteger, ForeignKey("deletion.id"), primary_key=True),
    Index("confirmation_deletion", "deletion_id"),
)

# Files of stock vLLM-Omni that were looked at. ``name_key`` of a deleted voice is
# the hash of its name; ``deletion_id`` says who has still to remove the file.
imported_file = Table(
    "imported_file",
    metadata,
    Column("file_name", Text, primary_key=True),
    Column("mtime_ns", BigInteger, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("name_key", Text),
    Column("created_at", Float),
    Column("deleted_at", Float),
    Column("deletion_id", BigInteger),
    Index("imported_file_name", "name_key"),
    Index("imported_file_deletion", "deletion_id"),
)

# One step per version, appended to and never edited: a database that exists ran the
# earlier ones. A new database is made as the tables above say, at the last version.
MIGRATIONS: tuple[Callable[[Connection], None], ...] = ()
VERSION = 1 + len(MIGRATIONS)


def stored_version(db: Connection) -> int:
    """The version of the schema; 0 if there are no tables."""
    if not inspect(db).has_table(schema_version.name):
        return 0
    return db.execute(select(schema_version.c.version)).scalar_one()


def migrate(db: Connection) -> None:
    """Bring the schema up to date, within the caller's transaction.

    Raises:
        StorageError: The database was written by a newer version of this package.
    """
    version = stored_version(db)
    if version > VERSION:
        raise StorageError(
            f"The voice catalogue was written by a newer vllm-tts-cache (schema "
            f"{version}; this one knows {VERSION}). Upgrade vllm-tts-cache, or set "
            "SPEAKER_SAMPLES_DIR to another directory."
        )
    if version == 0:
        metadata.create_all(db)
        db.execute(schema_version.insert().values(version=VERSION))
        return
    for step in MIGRATIONS[version - 1 :]:
        step(db)
    if version < VERSION:
        db.execute(schema_version.update().values(version=VERSION))


def slices(values: Sequence[str]) -> Iterator[Sequence[str]]:
    """Cut a list that becomes parameters into as many as a statement may have."""
    for start in range(0, len(values), _PER_STATEMENT):
        yield values[start : start + _PER_STATEMENT]
