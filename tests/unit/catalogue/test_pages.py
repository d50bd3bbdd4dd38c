"""Lists are what sorting and filtering all voices by hand gives."""

import itertools
import random
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import text

from tests.store_samples import register_vector
from vllm_tts_cache.catalogue import pages
from vllm_tts_cache.catalogue.pages import PAGE_MAX_BYTES, Page, cursor
from vllm_tts_cache.catalogue.records import SpeakerChanges
from vllm_tts_cache.errors import InvalidSpeakerError

SORTS = ("name", "newest", "oldest")


@pytest.fixture
def voices(store):
    """Voices of few ages, so that many are as old as another one."""
    draw = random.Random(3)
    made = []
    for number in range(60):
        labels = {"Team": draw.choice(["News", "Sports"]), "n": str(number % 3)}
        fields = {
            "labels": dict(draw.sample(sorted(labels.items()), draw.randrange(3))),
            "description": draw.choice([None, "Tiefe STIMME", "hell"]),
            "created_at": float(draw.randrange(5)),
        }
        name = f"{draw.choice('äBcD')}-{number}"
        made.append(register_vector(store, name, **fields))
    return made


def in_order(records, sort):
    if sort == "name":
        return sorted(records, key=lambda record: record.name_key)
    by_age = sorted(records, key=lambda record: (record.created_at, record.speaker_id))
    return by_age[::-1] if sort == "newest" else by_age


def paged(store, **fields: Any):
    seen, after = [], ""
    while True:
        page = Page(limit=7, after=after, **fields)
        records = store.records(page)
        assert store.names(page) == [record.name for record in records]
        seen += records
        if len(records) < 7:
            return seen
        after = cursor(records[-1], page.sort)


@pytest.mark.sqlite
@pytest.mark.parametrize("sort", SORTS)
def test_voices_with_much_text_are_never_all_in_memory(store, sort):
    """A page of those from before there were limits was gigabytes."""
    made = [register_vector(store, f"v{n:03}") for n in range(150)]
    with store.database.write() as db:
        db.execute(text("UPDATE speaker SET consent = :t"), {"t": "x" * 1_000_000})
    tracemalloc.start()
    shown, page = [], Page(limit=1000, sort=sort)
    while records := store.records(page):
        # Whoever answers with one of them has to see that there are more.
        is_last = len(shown) + len(records) == len(made)
        assert is_last or sum(len(r.consent) for r in records) > PAGE_MAX_BYTES
        shown += [record.name for record in records]
        page = replace(page, after=cursor(records[-1], sort))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert shown == [record.name for record in in_order(made, sort)]
    assert peak_bytes < 10 * PAGE_MAX_BYTES


LABELS = ({}, {"TEAM": "news"}, {"team": "News", "n": "1"})
SEARCHES = ("", "stimme", "NEWS", "-1")


@pytest.mark.every_backend
def test_pages_hold_what_fits_in_order(store, voices, monkeypatch):
    monkeypatch.setattr(pages, "_PART", 3)  # of the seven on each
    for sort, labels, search in itertools.product(SORTS, LABELS, SEARCHES):
        expected = fitting(voices, labels, search)
        found = paged(store, sort=sort, labels=labels, search=search)
        assert found == in_order(expected, sort), (sort, labels, search)


def fitting(voices, labels, search):
    def fits(record):
        folded = {k.casefold(): v.casefold() for k, v in record.labels.items()}
        words = [record.name_key, record.description or "", *record.labels.values()]
        return any(search.casefold() in word.casefold() for word in words) and all(
            folded.get(k.casefold()) == v.casefold() for k, v in labels.items()
        )

    return filter(fits, voices)


@pytest.mark.every_backend
@pytest.mark.parametrize("sort", SORTS)
def test_a_page_begins_behind_an_id_too(store, voices, sort):
    ordered = in_order(voices, sort)
    page = Page(limit=100, after=ordered[20].speaker_id, sort=sort)
    assert store.records(page) == ordered[21:]


@pytest.mark.every_backend
def test_a_voice_that_changes_is_found_by_what_it_says_now(store, voices):
    name = voices[0].name
    changes = SpeakerChanges({"labels": {"mood": "Calm"}, "description": "Zebra"})
    store.registrations.change(name, changes)
    labelled = Page(limit=9, labels={"Mood": "calm"})
    for page in (Page(limit=9, search="zebra"), Page(limit=9, search="calm"), labelled):
        assert store.names(page) == [name]
    store.remove_files(store.registrations.delete(name))
    register_vector(store, "new")
    assert store.names(labelled) == []


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"limit": 1, "search": "\ud800"}, "search"),
        ({"limit": 1, "after": "\ud800"}, "after"),
        ({"limit": 1, "labels": {"a": "\ud800"}}, "label"),
        ({"limit": 1, "after": "nobody", "sort": "newest"}, "after"),
    ],
)
def test_a_page_that_cannot_be_is_refused_by_what_is_wrong(store, fields, field):
    with pytest.raises(InvalidSpeakerError) as caught:
        store.records(Page(**fields))
    assert caught.value.field == field
