"""Rows of ``stored_file`` and their sums; the caller provides the transaction."""

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    Connection,
    RowMapping,
    bindparam,
    case,
    cast,
    exists,
    func,
    select,
)

from vllm_tts_cache.audio.reference import AUDIO, Segment
from vllm_tts_cache.catalogue import objects, owners, schema
from vllm_tts_cache.catalogue.schema import (
    consent,
    failed_encode,
    slices,
    speaker,
    stored_file,
    usage,
)

# No family makes more encodings of one audio.
_ENCODINGS_EACH = 4
# A failed encode is tried again after a minute, then 4, 16, and 60 each time.
_RETRY_SECONDS = 60.0
_MAX_RETRY_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file that is stored, or is to be.

    Attributes:
        artifact: ``audio``, or the fingerprint of the encoder that made it.
        object_name: Its name in an object store; None for a file of a directory.
        is_suspect: Whether the last read of the audio found it missing or damaged.
    """

    audio_sha256: str
    artifact: str
    segment: Segment
    num_bytes: int
    object_name: str | None = None
    is_suspect: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """The usage of one segment: of its audio, or of its encodings."""

    num_files: int = 0
    num_bytes: int = 0


class FailedEncode(NamedTuple):
    """Why an encode failed last, how many failed that were due, when the next is."""

    reason: str
    num_attempts: int
    next_try: float


_ROW = stored_file.c
_IS_OF_AUDIO = _ROW.audio_sha256 == bindparam("of_sha")
_IS_ROW = _IS_OF_AUDIO & (_ROW.artifact == bindparam("of_artifact"))
_ROWS = select(*(_ROW[field.name] for field in fields(StoredFile)))
_OTHER = stored_file.alias()
_IS_SUM, _IS_OF_KIND, _IS_OTHER_OF_KIND = (
    (columns.segment == bindparam("of_segment"))
    & (columns.is_audio == bindparam("of_audio"))
    for columns in (usage.c, _ROW, _OTHER.c)
)
# A time after every use before, even if the clock was set back.
_NEWEST = func.coalesce(func.max(_OTHER.c.used_at), 0)
_AFTER_NEWEST = select(_NEWEST + 1).where(_IS_OTHER_OF_KIND).scalar_subquery()
_NOW_USED = bindparam("now_used", type_=BigInteger)
_NEXT_USE = case((_AFTER_NEWEST > _NOW_USED, _AFTER_NEWEST), else_=_NOW_USED)
# What each registration runs is built once: SQLAlchemy takes longer to build one
# of these statements than SQLite takes to run it.
_FIND = _ROWS.where(_IS_ROW)
_OF_AUDIO = _ROWS.where(_IS_OF_AUDIO).order_by(_ROW.id)
_INSERT = stored_file.insert().values(used_at=_NEXT_USE)
_DELETE = stored_file.delete().where(_IS_ROW)
_FAILED = failed_encode.c
_HAS_FAILED = _FAILED.audio_sha256 == bindparam("of_sha")
_DELETE_FAILURES = failed_encode.delete().where(_HAS_FAILED)
_DELETE_FAILURE = _DELETE_FAILURES.where(_FAILED.artifact == bindparam("of_artifact"))
_USED = select(usage.c.num_files, usage.c.num_bytes).where(_IS_SUM)
_MORE = {
    "num_files": usage.c.num_files + bindparam("more_files"),
    "num_bytes": usage.c.num_bytes + bindparam("more_bytes"),
}
_ADD = usage.update().where(_IS_SUM).values(_MORE).returning(usage.c.num_bytes)
_SINCE = (
    select(_ROW.id, _ROW.audio_sha256, _ROW.artifact)
    .where(_ROW.id > bindparam("after"))
    .order_by(_ROW.id.desc())
    .limit(bindparam("most"))
)


def find(db: Connection, audio_sha256: str, artifact: str) -> StoredFile | None:
    """Return the row of one file; None if it is not stored."""
    where = {"of_sha": audio_sha256, "of_artifact": artifact}
    row = db.execute(_FIND, where).mappings().first()
    return None if row is None else _file(row)


def of_audio(db: Connection, audio_sha256: str) -> list[StoredFile]:
    """Return the rows of an audio and its encodings, in the order of insertion."""
    rows = db.execute(_OF_AUDIO, {"of_sha": audio_sha256})
    return [_file(row) for row in rows.mappings()]


def between(db: Connection, first: str, last: str) -> list[StoredFile]:
    """Return rows whose address is at least ``first`` and less than ``last``."""
    sha = _ROW.audio_sha256
    rows = db.execute(_ROWS.where(sha >= first, sha < last))
    return [_file(row) for row in rows.mappings()]


def unowned(db: Connection, first: str, last: str) -> set[str]:
    """Return addresses in that range that count as registered and have no owner."""
    sha = _ROW.audio_sha256
    is_registered = _ROW.segment == Segment.REGISTERED.value
    query = select(sha).distinct().where(sha >= first, sha < last, is_registered)
    for owner in (speaker, consent):
        query = query.where(~exists().where(owner.c.audio_sha256 == sha))
    return set(db.execute(query).scalars())


def prefixes(db: Connection) -> set[str]:
    """Return the first two digits of all addresses; reads an index once through."""
    query = select(func.substr(_ROW.audio_sha256, 1, 2)).distinct()
    return set(db.execute(query).scalars())


def artifacts(
    db: Connection, audio_sha256s: Sequence[str]
) -> dict[str, frozenset[str]]:
    """Return what each audio has: ``AUDIO``, encoders' fingerprints."""
    found = dict.fromkeys(audio_sha256s, frozenset[str]())
    columns = select(_ROW.audio_sha256, _ROW.artifact)
    for some in slices(list(found)):
        for sha, artifact in db.execute(columns.where(_ROW.audio_sha256.in_(some))):
            found[sha] |= {artifact}
    return found


def put(db: Connection, file: StoredFile, replaced: StoredFile | None) -> int:
    """Insert the file's row in the place of the one of its address and artifact.

    Its id is a new one, so that `since` returns it. Returns how many bytes the audio,
    or the encodings, of its segment have with it. ``replaced`` is the row that is there
    now, read in this transaction.
    """
    if replaced is not None:
        _remove(db, replaced)
    is_audio = int(file.artifact == AUDIO)
    where = {"of_segment": file.segment.value, "of_audio": is_audio}
    row = asdict(file) | {"segment": file.segment.value, "is_audio": is_audio}
    row["is_suspect"] = int(file.is_suspect)
    times = {"now_used": time.time_ns() // 1000, "created_at": time.time()}
    db.execute(_INSERT, where | row | times)
    # What failed as the audio was lost is worth a try now.
    where = {"of_sha": file.audio_sha256, "of_artifact": file.artifact}
    db.execute(_DELETE_FAILURES if is_audio else _DELETE_FAILURE, where)
    return _count(db, file.segment, is_audio, 1, file.num_bytes)


def remove(
    db: Connection, audio_sha256: str, artifacts: Collection[str] | None = None
) -> None:
    """Delete the rows of an audio, or those of some artifacts.

    Their objects become loose, and are removed once the transaction is committed.
    """
    for file in of_audio(db, audio_sha256):
        if artifacts is None or file.artifact in artifacts:
            _remove(db, file)
            if file.artifact == AUDIO:
                db.execute(_DELETE_FAILURES, {"of_sha": audio_sha256})


def _remove(db: Connection, file: StoredFile) -> None:
    sha = file.audio_sha256
    db.execute(_DELETE, {"of_sha": sha, "of_artifact": file.artifact})
    _count(db, file.segment, int(file.artifact == AUDIO), -1, -file.num_bytes)
    if file.object_name is not None:
        objects.release(db, file.object_name, sha)


def fail(db: Connection, audio_sha256: str, artifact: str, reason: str) -> None:
    """Store that an encode failed, and when it is worth another try.

    Writes nothing if the audio is not stored (any more), if an encoding is, or if the
    next try is still ahead: requests try in between.
    """
    stored = artifacts(db, [audio_sha256])[audio_sha256]
    if AUDIO not in stored or artifact in stored:
        return
    before = failures(db, audio_sha256).get(artifact, FailedEncode("", 0, 0.0))
    if before.next_try > (now := schema.now(db)):
        return
    wait_seconds = min(_RETRY_SECONDS * 4**before.num_attempts, _MAX_RETRY_SECONDS)
    db.execute(_DELETE_FAILURE, {"of_sha": audio_sha256, "of_artifact": artifact})
    new = FailedEncode(reason, before.num_attempts + 1, now + wait_seconds)
    key = {"audio_sha256": audio_sha256, "artifact": artifact}
    db.execute(failed_encode.insert(), key | new._asdict())


def failures(db: Connection, audio_sha256: str) -> dict[str, FailedEncode]:
    """Return the failed encodes of an audio, by the encoder's fingerprint."""
    where = _FAILED.audio_sha256 == audio_sha256
    rows = db.execute(select(failed_encode).where(where))
    return {row.artifact: FailedEncode(*row[2:]) for row in rows}


def remove_unowned(db: Connection, audio_sha256: str | None) -> None:
    """Delete the rows of an audio without owners; with None it does nothing."""
    if audio_sha256 is not None and not owners.is_owned(db, audio_sha256):
        remove(db, audio_sha256)


def suspect(db: Connection, audio_sha256: str, is_suspect: bool) -> None:
    """Note whether the last read of an audio found it missing or damaged."""
    where = {"of_sha": audio_sha256, "of_artifact": AUDIO}
    values = {"is_suspect": int(is_suspect)}
    db.execute(stored_file.update().where(_IS_ROW).values(**values), where)


def move(db: Connection, audio_sha256: str, segment: Segment) -> None:
    """Count all of an audio against another segment."""
    for file in of_audio(db, audio_sha256):
        if file.segment is segment:
            continue
        is_audio = int(file.artifact == AUDIO)
        where = {
            "of_sha": audio_sha256,
            "of_artifact": file.artifact,
            "of_segment": segment.value,
            "of_audio": is_audio,
            "now_used": time.time_ns() // 1000,
        }
        values = {"segment": segment.value, "used_at": _NEXT_USE}
        db.execute(stored_file.update().where(_IS_ROW).values(**values), where)
        _count(db, file.segment, is_audio, -1, -file.num_bytes)
        _count(db, segment, is_audio, 1, file.num_bytes)


def touch(db: Connection, audio_sha256s: Iterable[str]) -> None:
    """Set the last use of these audios and their encodings to now."""
    now_used = time.time_ns() // 1000
    use = stored_file.update().where(_IS_OF_KIND).values(used_at=_NEXT_USE)
    for some in slices(sorted(set(audio_sha256s))):
        for segment, is_audio in product(Segment, (0, 1)):
            kind = {"of_segment": segment.value, "of_audio": is_audio}
            used = use.where(_ROW.audio_sha256.in_(some))
            db.execute(used, kind | {"now_used": now_used})


def used(db: Connection, segment: Segment, *, is_audio: bool) -> Usage:
    """Return the usage of a segment's audio or encodings; reads one row."""
    where = {"of_segment": segment.value, "of_audio": int(is_audio)}
    row = db.execute(_USED, where).first()
    return Usage() if row is None else Usage(*row)


def oldest(
    db: Connection, segment: Segment, is_audio: bool, *, limit: int
) -> list[StoredFile]:
    """Return files of a segment, least recently used first."""
    query = _ROWS.where(_IS_OF_KIND).order_by(_ROW.used_at, _ROW.id).limit(limit)
    kind = {"of_segment": segment.value, "of_audio": int(is_audio)}
    return [_file(row) for row in db.execute(query, kind).mappings()]


def since(db: Connection, file_id: int, limit: int) -> list[tuple[int, str, str]]:
    """Return the newest rows after an id, those of audio too: (id, audio, artifact)."""
    rows = db.execute(_SINCE, {"after": file_id, "most": limit})
    return [(number, sha, artifact) for number, sha, artifact in rows]


def sums(db: Connection) -> dict[tuple[str, int], Usage]:
    """Return what ``usage`` must hold, summed over all rows."""
    group = _ROW.segment, _ROW.is_audio
    # PostgreSQL adds whole numbers up to a decimal one.
    num_bytes = cast(func.sum(_ROW.num_bytes), BigInteger)
    query = select(*group, func.count(), num_bytes).group_by(*group)
    return {(s, a): Usage(files, size) for s, a, files, size in db.execute(query)}


def usage_problems(db: Connection) -> list[str]:
    """Return a line for each difference of ``usage`` from the rows."""
    rows = db.execute(select(usage))
    kept = {(s, a): Usage(files, size) for s, a, files, size in rows}
    real = sums(db)
    return [
        f"usage of {key[0]}, {'audio' if key[1] else 'encodings'}: "
        f"{kept.get(key)}, the rows say {real.get(key)}"
        for key in sorted(kept.keys() | real.keys())
        if kept.get(key, Usage()) != real.get(key, Usage())
    ]


def repair_usage(db: Connection) -> None:
    """Rebuild ``usage`` from the rows."""
    db.execute(usage.delete())
    for (segment, is_audio), total in sums(db).items():
        _count(db, Segment(segment), is_audio, total.num_files, total.num_bytes)


def _count(
    db: Connection, segment: Segment, is_audio: int, num_files: int, num_bytes: int
) -> int:
    """Add to a sum of ``usage``; return its bytes."""
    where = {"of_segment": segment.value, "of_audio": is_audio}
    more = {"more_files": num_files, "more_bytes": num_bytes}
    total: int | None = db.execute(_ADD, where | more).scalar()
    if total is not None:
        return total
    row = {"segment": segment.value, "is_audio": is_audio}
    db.execute(usage.insert(), row | {"num_files": num_files, "num_bytes": num_bytes})
    return num_bytes


def _file(row: RowMapping) -> StoredFile:
    values: dict[str, Any] = dict(row)
    values["segment"] = Segment(values["segment"])
    values["is_suspect"] = bool(values["is_suspect"])
    return StoredFile(**values)


def last_used_speakers(db: Connection, limit: int) -> list[tuple[str, str]]:
    """Return tenants and names of speakers whose encodings were used or made last.

    The last one comes first. Of several speakers with one audio only the newest is
    returned: which of them spoke is not known.
    """
    of_kind = _ROW.segment == Segment.REGISTERED.value, _ROW.is_audio == 0
    query = select(_ROW.audio_sha256).where(*of_kind)
    query = query.order_by(_ROW.used_at.desc(), _ROW.id.desc())
    found = db.execute(query.limit(_ENCODINGS_EACH * limit)).scalars()
    audios = list(dict.fromkeys(found))[:limit]
    its = speaker.c
    newest = select(func.max(its.generation)).where(its.audio_sha256.in_(audios))
    is_newest = its.generation.in_(newest.group_by(its.audio_sha256))
    columns = its.audio_sha256, its.tenant, its.name
    rows = db.execute(select(*columns).where(is_newest))
    named = {sha: (tenant, name) for sha, tenant, name in rows}
    return [named[sha] for sha in audios if sha in named]
