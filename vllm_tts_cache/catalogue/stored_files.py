"""Rows of the table ``stored_file`` and their sums; the caller has the transaction."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from sqlalchemy import BigInteger, Connection, RowMapping, bindparam, cast, func, select

from vllm_tts_cache.catalogue import objects, owners
from vllm_tts_cache.catalogue.records import AUDIO_KIND, Segment
from vllm_tts_cache.catalogue.schema import slices, speaker, stored_file, usage

# At least as many as a family makes encodings of one audio.
_ENCODINGS_EACH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file that is stored, or is to be.

    Attributes:
        kind: ``audio``, or the fingerprint of the encoder that made it.
        object_name: Where it is in an object store; None for a file of its directory.
        is_suspect: Whether the last read of the audio found it missing or damaged.
    """

    audio_sha256: str
    kind: str
    segment: Segment
    num_bytes: int
    object_name: str | None = None
    is_suspect: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """What one segment holds of one kind of file."""

    num_files: int = 0
    num_bytes: int = 0


_IS_ROW = (stored_file.c.audio_sha256 == bindparam("of_sha")) & (
    stored_file.c.kind == bindparam("of_kind")
)
_ROWS = select(*(stored_file.c[field.name] for field in fields(StoredFile)))
_FIND = _ROWS.where(_IS_ROW)


def find(db: Connection, audio_sha256: str, kind: str) -> StoredFile | None:
    """The row of one file."""
    where = {"of_sha": audio_sha256, "of_kind": kind}
    row = db.execute(_FIND, where).mappings().first()
    return None if row is None else _file(row)


def of_audio(db: Connection, audio_sha256: str) -> list[StoredFile]:
    """The rows of an audio and its encodings, in the order in which they came."""
    where = stored_file.c.audio_sha256 == audio_sha256
    query = _ROWS.where(where).order_by(stored_file.c.id)
    return [_file(row) for row in db.execute(query).mappings()]


def between(db: Connection, first: str, last: str) -> list[StoredFile]:
    """The rows whose address is at least ``first`` and less than ``last``."""
    sha = stored_file.c.audio_sha256
    query = _ROWS.where(sha >= first, sha < last)
    return [_file(row) for row in db.execute(query).mappings()]


def prefixes(db: Connection) -> set[str]:
    """The first two digits of all addresses; reads an index once through."""
    query = select(func.substr(stored_file.c.audio_sha256, 1, 2)).distinct()
    return set(db.execute(query).scalars())


def kinds(db: Connection, audio_sha256s: Sequence[str]) -> dict[str, set[str]]:
    """Which kinds are stored of each audio."""
    found: dict[str, set[str]] = {sha: set() for sha in audio_sha256s}
    columns = select(stored_file.c.audio_sha256, stored_file.c.kind)
    for some in slices(list(found)):
        query = columns.where(stored_file.c.audio_sha256.in_(some))
        for sha, kind in db.execute(query):
            found[sha].add(kind)
    return found


def put(db: Connection, file: StoredFile, used_at: int | None = None) -> None:
    """Insert the file's row in the place of the one of its address and kind.

    Its number is a new one, so that who asks what came since sees it.
    """
    remove(db, file.audio_sha256, [file.kind])
    is_audio = int(file.kind == AUDIO_KIND)
    if used_at is None:
        used_at = _next_use(db, file.segment, is_audio)
    row = asdict(file) | {"segment": file.segment.value, "is_audio": is_audio}
    row["is_suspect"] = int(file.is_suspect)
    times = {"used_at": used_at, "created_at": time.time()}
    db.execute(stored_file.insert(), row | times)
    _count(db, file.segment, is_audio, 1, file.num_bytes)


def remove(
    db: Connection, audio_sha256: str, kinds: Iterable[str] | None = None
) -> list[StoredFile]:
    """Delete the rows of an audio, or only those kinds of it; return what they were.

    Their objects are nobody's from then on, and are removed once that is committed.
    """
    gone = of_audio(db, audio_sha256)
    if kinds is not None:
        chosen = set(kinds)
        gone = [file for file in gone if file.kind in chosen]
    for file in gone:
        where = {"of_sha": file.audio_sha256, "of_kind": file.kind}
        db.execute(stored_file.delete().where(_IS_ROW), where)
        _count(db, file.segment, int(file.kind == AUDIO_KIND), -1, -file.num_bytes)
        if file.object_name is not None:
            objects.let_go(db, file.object_name, audio_sha256)
    return gone


def remove_unowned(db: Connection, audio_sha256: str | None) -> None:
    """Delete the rows of an audio that is nobody's any more; None is no audio."""
    if audio_sha256 is not None and not owners.is_owned(db, audio_sha256):
        remove(db, audio_sha256)


def suspect(db: Connection, audio_sha256: str, is_suspect: bool) -> None:
    """Note whether the last read of an audio found it missing or damaged."""
    where = {"of_sha": audio_sha256, "of_kind": AUDIO_KIND}
    values = {"is_suspect": int(is_suspect)}
    db.execute(stored_file.update().where(_IS_ROW).values(**values), where)


def move(db: Connection, audio_sha256: str, segment: Segment) -> None:
    """Count all of an audio against another segment."""
    for file in of_audio(db, audio_sha256):
        if file.segment is segment:
            continue
        is_audio = int(file.kind == AUDIO_KIND)
        where = {"of_sha": audio_sha256, "of_kind": file.kind}
        values = {"segment": segment.value, "used_at": _next_use(db, segment, is_audio)}
        db.execute(stored_file.update().where(_IS_ROW).values(**values), where)
        _count(db, file.segment, is_audio, -1, -file.num_bytes)
        _count(db, segment, is_audio, 1, file.num_bytes)


def touch(db: Connection, audio_sha256s: Iterable[str]) -> None:
    """Count as used now what is stored of these audios."""
    now = {
        (segment, is_audio): _next_use(db, segment, is_audio)
        for segment in Segment
        for is_audio in (0, 1)
    }
    for some in slices(sorted(set(audio_sha256s))):
        for (segment, is_audio), used_at in now.items():
            where = (
                stored_file.c.audio_sha256.in_(some),
                stored_file.c.segment == segment.value,
                stored_file.c.is_audio == is_audio,
            )
            db.execute(stored_file.update().where(*where).values(used_at=used_at))


def used(db: Connection, segment: Segment, *, is_audio: bool) -> Usage:
    """What a segment holds; reads one row."""
    query = select(usage.c.num_files, usage.c.num_bytes).where(
        usage.c.segment == segment.value, usage.c.is_audio == int(is_audio)
    )
    row = db.execute(query).first()
    return Usage() if row is None else Usage(*row)


def oldest(
    db: Connection, segment: Segment, is_audio: bool, *, limit: int
) -> list[StoredFile]:
    """Files of a segment, least recently used first."""
    query = (
        _ROWS.where(
            stored_file.c.segment == segment.value,
            stored_file.c.is_audio == int(is_audio),
        )
        .order_by(stored_file.c.used_at, stored_file.c.id)
        .limit(limit)
    )
    return [_file(row) for row in db.execute(query).mappings()]


def since(db: Connection, file_id: int, limit: int) -> list[tuple[int, str, str]]:
    """Encodings stored after a number: (number, audio, encoder), in that order."""
    columns = stored_file.c.id, stored_file.c.audio_sha256, stored_file.c.kind
    query = (
        select(*columns)
        .where(stored_file.c.id > file_id, stored_file.c.is_audio == 0)
        .order_by(stored_file.c.id)
        .limit(limit)
    )
    return [(number, sha, kind) for number, sha, kind in db.execute(query)]


def last_id(db: Connection) -> int:
    """The number of the newest row; 0 if there is none."""
    return db.execute(select(func.max(stored_file.c.id))).scalar() or 0


def sums(db: Connection) -> dict[tuple[str, int], Usage]:
    """What ``usage`` must say, added up from all rows."""
    group = stored_file.c.segment, stored_file.c.is_audio
    # PostgreSQL adds whole numbers up to a decimal one.
    num_bytes = cast(func.sum(stored_file.c.num_bytes), BigInteger)
    total = func.count(), num_bytes
    query = select(*group, *total).group_by(*group)
    return {(s, a): Usage(files, size) for s, a, files, size in db.execute(query)}


def usage_problems(db: Connection) -> list[str]:
    """Where ``usage`` differs from the rows."""
    found = db.execute(select(usage)).all()
    kept = {(s, a): Usage(files, size) for s, a, files, size in found}
    real = sums(db)
    return [
        f"usage of {key[0]}, {'audio' if key[1] else 'encodings'}: "
        f"{kept.get(key)}, the rows say {real.get(key)}"
        for key in sorted(kept.keys() | real.keys())
        if kept.get(key, Usage()) != real.get(key, Usage())
    ]


def repair_usage(db: Connection) -> None:
    """Make ``usage`` say what the rows add up to."""
    db.execute(usage.delete())
    for (segment, is_audio), total in sums(db).items():
        _count(db, Segment(segment), is_audio, total.num_files, total.num_bytes)


def _count(
    db: Connection, segment: Segment, is_audio: int, num_files: int, num_bytes: int
) -> None:
    where = usage.c.segment == segment.value, usage.c.is_audio == is_audio
    values = {
        "num_files": usage.c.num_files + num_files,
        "num_bytes": usage.c.num_bytes + num_bytes,
    }
    if db.execute(usage.update().where(*where).values(**values)).rowcount == 0:
        row = {
            "segment": segment.value,
            "is_audio": is_audio,
            "num_files": num_files,
            "num_bytes": num_bytes,
        }
        db.execute(usage.insert(), row)


def _next_use(db: Connection, segment: Segment, is_audio: int) -> int:
    """A time that is later than every use before, wherever the clock was set to."""
    newest = select(func.max(stored_file.c.used_at)).where(
        stored_file.c.segment == segment.value, stored_file.c.is_audio == is_audio
    )
    return max(time.time_ns() // 1000, (db.execute(newest).scalar() or 0) + 1)


def _file(row: RowMapping) -> StoredFile:
    values: dict[str, Any] = dict(row)
    values["segment"] = Segment(values["segment"])
    values["is_suspect"] = bool(values["is_suspect"])
    return StoredFile(**values)


def last_used_speakers(db: Connection, limit: int) -> list[tuple[str, str]]:
    """Tenants and names of speakers whose encodings were used or made last.

    The last one comes first. Of several speakers of one audio it is the newest: which
    of them spoke is not known.
    """
    query = (
        select(stored_file.c.audio_sha256)
        .where(
            stored_file.c.segment == Segment.REGISTERED.value,
            stored_file.c.is_audio == 0,
        )
        .order_by(stored_file.c.used_at.desc(), stored_file.c.id.desc())
        .limit(_ENCODINGS_EACH * limit)
    )
    audios = list(dict.fromkeys(db.execute(query).scalars()))[:limit]
    newest = (
        select(func.max(speaker.c.generation))
        .where(speaker.c.audio_sha256.in_(audios))
        .group_by(speaker.c.audio_sha256)
    )
    columns = speaker.c.audio_sha256, speaker.c.tenant, speaker.c.name
    rows = db.execute(select(*columns).where(speaker.c.generation.in_(newest)))
    named = {sha: (tenant, name) for sha, tenant, name in rows}
    return [named[sha] for sha in audios if sha in named]
