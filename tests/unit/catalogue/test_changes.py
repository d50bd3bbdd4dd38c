"""Ids, and what a PATCH changes."""

import time
import tracemalloc

import pytest

from tests.store_samples import address, clip, delete, register, register_vector, voice
from vllm_tts_cache.catalogue import schema
from vllm_tts_cache.catalogue.names import (
    CONSENT_PREFIX,
    VOICE_PREFIX,
    is_voice_id,
    new_id,
)
from vllm_tts_cache.catalogue.pages import Page
from vllm_tts_cache.catalogue.records import SpeakerChanges
from vllm_tts_cache.errors import (
    InvalidSpeakerError,
    SpeakerExistsError,
    SpeakerNotFoundError,
)


def change(store, voice, **given):
    return store.registrations.change(voice, SpeakerChanges(given))


@pytest.mark.every_backend
def test_an_id_outlives_renaming_and_registering_anew_but_no_deletion(store):
    first = register(store, "Ann", 0).record
    assert is_voice_id(first.speaker_id)
    assert store.find(first.speaker_id).record == first
    done = register(store, "ann", 1)
    store.remove_files(done.deletion)
    again = done.record
    assert again.speaker_id == first.speaker_id
    renamed = change(store, "ANN", name="Bea").record
    assert (renamed.speaker_id, renamed.name) == (first.speaker_id, "Bea")
    assert store.find("Ann") is None
    assert store.find(first.speaker_id).record == renamed == store.find("bea").record
    delete(store, first.speaker_id)
    assert store.find(first.speaker_id) is None
    assert register(store, "Bea").record.speaker_id != first.speaker_id


@pytest.mark.every_backend
def test_a_deletion_is_asked_for_by_the_id_as_well_whatever_is_around_it(store):
    record = register(store, "Ann").record
    spaced = f" {record.speaker_id}\n"
    deletion = store.registrations.delete(spaced)
    assert deletion.public_id == record.speaker_id
    by_id, by_name = store.progress(spaced), store.progress(" aNN ")
    assert by_id == by_name and not by_id.files_removed
    store.remove_files(deletion)
    assert store.progress(spaced).is_finished
    store.acknowledge(deletion.id)
    assert store.progress(spaced) is None


@pytest.mark.parametrize("prefix", [VOICE_PREFIX, CONSENT_PREFIX])
def test_no_new_voice_is_called_like_an_id(store, prefix):
    name = new_id(prefix)
    for spelled in (name, name.upper()):
        with pytest.raises(InvalidSpeakerError, match="the form of an id"):
            register(store, spelled)
    with pytest.raises(SpeakerNotFoundError):
        store.registrations.delete(name)


def test_an_older_voice_that_is_called_like_an_id_is_still_found(store):
    name = new_id(VOICE_PREFIX)
    store.registrations.register(voice(name, clip(), taken_over=True), clip())
    assert store.find(name).record.name == name


@pytest.mark.every_backend
def test_a_change_says_what_changes_and_leaves_the_rest(store):
    before = register(store, "Ann", 0, ref_text="words", description="old").record
    given = {
        "description": None,
        "language": "pt-BR",
        "labels": {"Team": "News"},
        "expires_at": time.time() + 60,
    }
    done = change(store, "ann", **given)
    after = done.record
    assert store.find("Ann").record == after
    assert {name: getattr(after, name) for name in given} == given
    assert after.ref_text == "words" and after.generation == before.generation
    assert before.updated_at is None and after.updated_at >= before.created_at
    assert done.deletion is None
    assert change(store, "ann", labels=None).record.labels == {}


def test_another_transcript_makes_everybody_delete_the_prompts_of_the_old_one(store):
    register(store, "Ann", 0, ref_text="words")
    assert change(store, "Ann", ref_text="words").deletion is None
    done = change(store, "Ann", ref_text="other words")
    assert done.deletion.audio_sha256 == address(0)
    store.remove_files(done.deletion)
    assert store.read_audio(address(0)) is not None


@pytest.mark.every_backend
def test_a_name_that_is_taken_is_not_taken_over(store):
    register(store, "Ann", 0)
    register(store, "Bea", 1)
    with pytest.raises(SpeakerExistsError, match="keeps its name"):
        change(store, "Ann", name="BEA")
    assert change(store, "Ann", name="ANN").record.name == "ANN"
    assert sorted(store.names(Page(limit=9))) == ["ANN", "Bea"]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "body"),
        ({"name": "default"}, "name"),
        ({"name": "a/b"}, "name"),
        ({"language": "german, I think"}, "language"),
        ({"language": "x" * 40}, "language"),
        ({"labels": {"a": ""}}, "labels"),
        ({"labels": {"a": "x" * 129}}, "labels"),
        ({"labels": {"a\n": "x"}}, "labels"),
        ({"labels": {"a": "x", "A": "y"}}, "labels"),
        ({"labels": {str(n): "x" for n in range(21)}}, "labels"),
        ({"labels": {"a": "\ud800"}}, "labels"),
        ({"expires_at": float("nan")}, "expires_at"),
        ({"expires_at": 1e300}, "expires_at"),
        ({"ref_text": "x" * 2001}, "ref_text"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(given, field):
    with pytest.raises(InvalidSpeakerError) as caught:
        SpeakerChanges(given)
    assert caught.value.field == field


def test_an_embedding_has_no_transcript(store):
    register_vector(store, "x")
    with pytest.raises(InvalidSpeakerError, match="ref_text"):
        change(store, "x", ref_text="words")


def test_an_end_that_is_past_is_refused(store):
    with pytest.raises(InvalidSpeakerError, match="past"):
        register(store, "Ann", 0, expires_at=time.time() - 1)
    register(store, "Bea", 1)
    with pytest.raises(InvalidSpeakerError, match="past"):
        change(store, "Bea", expires_at=time.time() - 1)
    assert store.names(Page(limit=9)) == ["Bea"]
    assert store.find("Bea").record.expires_at is None


def end(store, name):
    """Let the end of a voice come: one set in advance comes early on a busy machine."""
    its = schema.speaker.c.name == name
    with store.database.write() as db:
        past = time.time() - 3600
        db.execute(schema.speaker.update().where(its).values(expires_at=past))


@pytest.mark.sqlite
def test_of_voices_whose_end_has_come_the_names_alone_are_read(store):
    """A hundred thousand whole records were a gigabyte."""
    for number in range(20):
        register_vector(store, str(number))
    values = {"consent": "x" * 1_000_000, "expires_at": time.time() - 1}
    with store.database.write() as db:
        db.execute(schema.speaker.update().values(**values))
    tracemalloc.start()
    names = store.expired_names()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sorted(map(int, names)) == list(range(20))
    assert peak < 5_000_000


@pytest.mark.every_backend
def test_nobody_finds_a_voice_whose_end_has_come_and_then_it_is_deleted(store):
    register(store, "Ann", 0, expires_at=time.time() + 1800)
    register(store, "Bea", 1, expires_at=time.time() + 3600)
    assert store.find("Ann") is not None and not store.has_expired()
    assert store.registrations.delete_expired(10) == []
    end(store, "Ann")
    assert store.find("Ann") is None and store.has_expired()
    (deletion,) = store.registrations.delete_expired(10)
    store.remove_files(deletion)
    assert store.names(Page(limit=9)) == ["Bea"]
    assert not store.has_expired() and store.read_audio(address(0)) is None


@pytest.mark.every_backend
@pytest.mark.parametrize("number", [0, 1])
def test_an_ended_voice_is_not_listed_changed_or_registered_over(store, number):
    """Its clip goes with it in the transaction that stores the same one again."""
    first = register(store, "Ann", 0, expires_at=time.time() + 1800).record
    end(store, "Ann")
    assert store.names(Page(limit=9)) == []
    with pytest.raises(SpeakerNotFoundError):
        change(store, "Ann", expires_at=None)
    register(store, "Ann", number)
    assert store.find("Ann").record.speaker_id != first.speaker_id
    (deletion,) = store.unfinished_deletions()
    store.remove_files(deletion)
    assert (store.read_audio(address(0)) is None) is (number == 1)
