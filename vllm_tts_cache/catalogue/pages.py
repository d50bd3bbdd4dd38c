"""Lists of speakers, a page at a time: what is on one, and where the next begins."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, Select, and_, func, or_, select

from vllm_tts_cache.catalogue import schema, speakers
from vllm_tts_cache.catalogue.names import (
    MAX_LOOKED_UP_CHARS,
    fold,
    is_storable,
    is_voice_id,
)
from vllm_tts_cache.catalogue.records import DEFAULT_TENANT, SpeakerRecord
from vllm_tts_cache.catalogue.schema import speaker, speaker_label
from vllm_tts_cache.errors import InvalidSpeakerError

Sort = Literal["name", "newest", "oldest"]

# Of all records on a page: the event loop takes some milliseconds to answer with it.
PAGE_MAX_BYTES = 1024 * 1024
# What a record takes beside its texts.
_RECORD_BYTES = 768
# Rows per statement: PostgreSQL's driver, unlike SQLite's, fetches all rows before it
# returns one, and a voice from before there were limits may have a megabyte of text.
_PART = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Which speakers are listed.

    Attributes:
        limit: Speakers at most; positive.
        after: Where the page begins: behind the cursor of the last speaker that was
            listed, or behind a name, registered or not, or the id of a speaker.
        search: Only speakers whose name, alias, description or value of a label
            contains this, both folded.
        labels: Only speakers that have all of these.
        sort: ``name``: by the folded name. ``newest`` and ``oldest``: by age.
    """

    limit: int
    after: str = ""
    search: str = ""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    sort: Sort = "name"
    tenant: str = DEFAULT_TENANT

    def __post_init__(self) -> None:
        texts = ("after", self.after), ("search", self.search)
        labels = (("label", text) for pair in self.labels.items() for text in pair)
        for name, text in (*texts, *labels):
            if not is_storable(text):
                reason = "it contains an unpaired surrogate or NUL"
                raise InvalidSpeakerError(name, reason)
            if len(text.strip()) > MAX_LOOKED_UP_CHARS:
                reason = f"at most {MAX_LOOKED_UP_CHARS} characters are allowed"
                raise InvalidSpeakerError(name, reason)


def cursor(record: SpeakerRecord, sort: Sort) -> str:
    """Return the ``after`` of the page behind this speaker, deleted since or not."""
    if sort == "name":
        return record.name
    # Not the generation, which would show how much other tenants register.
    return f"{record.created_at!r}:{record.speaker_id}"


def records(db: Connection, page: Page) -> list[SpeakerRecord]:
    """Return a page's speakers, up to the one that exceeds ``PAGE_MAX_BYTES``.

    At least two are returned, if there are two. A caller that leaves out the last one,
    which exceeds it, knows that others follow. Only an empty page is surely the last.

    Raises: InvalidSpeakerError: ``after`` is no cursor.
    """
    found: list[SpeakerRecord] = []
    num_bytes = num_before = 0
    part_limit = _PART if schema.is_postgres(db) else page.limit
    while (num_left := page.limit - len(found)) > 0:
        after = cursor(found[-1], page.sort) if found else page.after
        part = replace(page, limit=min(num_left, part_limit), after=after)
        query = _on_page(db, speakers.RECORDS, part)
        with db.execute(query) as rows:  # closed: SQLite would go on reading
            for record in map(speakers.of_row, rows):
                found.append(record)
                num_bytes += _bytes_in_answer(record)
                if len(found) > 1 and num_bytes > PAGE_MAX_BYTES:
                    return found
        if len(found) < num_before + part.limit:
            break
        num_before = len(found)
    return found


def fit(records: Sequence[SpeakerRecord]) -> bool:
    """Whether the records take at most ``PAGE_MAX_BYTES`` in an answer."""
    return sum(map(_bytes_in_answer, records)) <= PAGE_MAX_BYTES


def _bytes_in_answer(record: SpeakerRecord) -> int:
    """Estimate how many bytes a record takes in an answer."""
    texts = record.consent, record.ref_text, record.description
    texts += record.labels_json, record.extras_json, *3 * (record.name,)
    # An answer is UTF-8: a character takes up to four bytes.
    return _RECORD_BYTES + sum(len(text.encode()) for text in texts if text)


def names(db: Connection, page: Page) -> list[str]:
    """Return the names of a whole page's speakers, without reading their records.

    Raises: InvalidSpeakerError: ``after`` is no cursor.
    """
    return list(db.execute(_on_page(db, select(speaker.c.name), page)).scalars())


def _on_page(db: Connection, query: Select[Any], page: Page) -> Select[Any]:
    is_there = speaker.c.expires_at.is_(None) | (speaker.c.expires_at > schema.now(db))
    query, row = _of_tenant(query.where(is_there), page)
    if part := fold(page.search):
        position = func.strpos if schema.is_postgres(db) else func.instr
        query = query.where(position(speaker.c.search_text, part) > 0)
    if page.after:
        query = query.where(_behind(db, page, row))
    age = row.created_at, speaker.c.speaker_id
    order = {"name": [row.name_key], "newest": [c.desc() for c in age], "oldest": age}
    return query.order_by(*order[page.sort]).limit(page.limit)


def _of_tenant(query: Select[Any], page: Page) -> tuple[Select[Any], Any]:
    """Limit a query to a tenant and labels; return the columns whose index orders it.

    With labels, those of the first one: few of a tenant's many voices may have it.
    """
    own = speaker.c
    if not page.labels:
        return query.where(own.tenant == page.tenant), own
    rows = [speaker_label.alias() for _ in page.labels]
    for (key, value), label in zip(page.labels.items(), rows, strict=True):
        query = query.join(label, label.c.generation == own.generation).where(
            label.c.tenant == page.tenant,
            label.c.label_key == fold(key),
            label.c.label_value == fold(value),
        )
    return query, rows[0].c


def _behind(db: Connection, page: Page, row: Any) -> "ColumnElement[bool]":
    if page.sort == "name":
        name = page.after
        if is_voice_id(name):
            found = speakers.find(db, page.tenant, name)
            name = name if found is None else found.name
        return row.name_key > fold(name)
    created_at, speaker_id = _age_of_cursor(db, page)
    age, id_ = row.created_at, speaker.c.speaker_id
    # Behind the cursor by (age, id), with a first condition that an index can use.
    if page.sort == "newest":
        return and_(age <= created_at, or_(age < created_at, id_ < speaker_id))
    return and_(age >= created_at, or_(age > created_at, id_ > speaker_id))


def _age_of_cursor(db: Connection, page: Page) -> tuple[float, str]:
    try:
        created_at, speaker_id = page.after.split(":")
        if not (math.isfinite(float(created_at)) and is_voice_id(speaker_id)):
            raise ValueError
        return float(created_at), speaker_id
    except ValueError:
        found = speakers.find(db, page.tenant, page.after)
        if found is None:
            reason = "it is neither a cursor of this order nor a voice; leave it out"
            raise InvalidSpeakerError("after", reason) from None
        return found.created_at, found.speaker_id
