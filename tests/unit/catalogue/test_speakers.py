import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from tests.store_samples import (
    RATE,
    address,
    clip,
    delete,
    fill,
    opened,
    register,
    register_vector,
    voice,
)
from vllm_tts_cache.audio.decode import join
from vllm_tts_cache.audio.reference import AUDIO
from vllm_tts_cache.catalogue import database, stored_files
from vllm_tts_cache.catalogue.pages import Page
from vllm_tts_cache.catalogue.records import NewSpeaker
from vllm_tts_cache.catalogue.schema import speaker, stored_file
from vllm_tts_cache.catalogue.sqlite import FILE_NAME
from vllm_tts_cache.errors import (
    InvalidSpeakerError,
    SpeakerExistsError,
    SpeakerNotFoundError,
    StorageError,
)
from vllm_tts_cache.store.speaker_store import SpeakerStore


@pytest.mark.every_backend
def test_a_speaker_comes_back_as_it_was_registered(store):
    before = time.time()
    fields = {
        "ref_text": "guten Tag",
        "description": "warm",
        "mime_type": "audio/flac",
        "original_filename": "zoë.flac",
        "file_size": 1234,
    }
    record = register(store, " Zoë ", 0, **fields).record
    assert store.find("ZOË").record == record
    assert (record.name, record.name_key, record.tenant) == ("Zoë", "zoë", "default")
    assert {field: getattr(record, field) for field in fields} == fields
    assert before <= record.created_at <= time.time()
    assert (record.seconds, record.embedding_dim) == (2000 / RATE, None)
    assert record.audio_sha256 == address(0)
    assert store.speaker_embedding(record) is None


@pytest.mark.every_backend
def test_a_speaker_of_several_clips_comes_back_with_them(store):
    audio = join([clip(0), clip(1, 3_000)])
    fields: Any = {"clip_starts": (0, 2_000), "ref_text": " one \n\n two"}
    new = voice("Ann", audio, **fields)
    record = store.registrations.register(new, audio).record
    assert store.find("ann").record == record
    assert record.clip_starts == (0, 2_000) and record.num_clips == 2
    assert record.clip_seconds == [2_000 / RATE, 3_000 / RATE]
    assert (record.seconds, record.ref_text) == (5_000 / RATE, "one\ntwo")
    plain = register(store, "Bea", 0).record
    assert (plain.num_clips, plain.clip_starts_json) == (1, None)


@pytest.mark.every_backend
def test_an_embedding_keeps_its_float32_values(store):
    values = (0.5, -1.25, 3.0)
    record = register_vector(store, "x", embedding=values)
    assert (record.embedding_dim, record.audio_sha256, record.seconds) == (3, None, 0.0)
    assert store.speaker_embedding(record) == values
    deletion = store.registrations.delete("x")
    assert deletion.audio_sha256 is None
    store.remove_files(deletion)
    assert store.progress("x").is_finished
    assert store.speaker_embedding(record) is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"embedding": ()}, "speaker_embedding"),
        ({"embedding": (float("nan"),)}, "speaker_embedding"),
        ({"embedding": (1e300,)}, "speaker_embedding"),
        ({"embedding": (0.0,) * 4097}, "speaker_embedding"),
        ({}, "speaker"),
        ({"embedding": (1.0,), "audio_sha256": "a"}, "speaker"),
        ({"audio_sha256": "a"}, "audio_sample"),
        ({"embedding": (1.0,), "ref_text": "\ud800"}, "ref_text"),
        ({"embedding": (1.0,), "ref_text": "a\0b"}, "ref_text"),
        ({"embedding": (1.0,), "name": "a/b"}, "name"),
        ({"embedding": (1.0,), "name": "a\u200b"}, "name"),
        ({"embedding": (1.0,), "name": "Default"}, "name"),
        ({"embedding": (1.0,), "consent": "x" * 513}, "consent"),
        ({"embedding": (1.0,), "ref_text": "x" * 2001}, "ref_text"),
        ({"embedding": (1.0,), "description": "x" * 2001}, "speaker_description"),
        ({"embedding": (1.0,), "description": "\ud800"}, "speaker_description"),
        ({"embedding": (1.0,), "original_filename": "x" * 256}, "audio_sample"),
        ({"embedding": (1.0,), "mime_type": "x" * 128}, "audio_sample"),
    ],
)
def test_what_cannot_be_registered_names_its_field(fields, field):
    with pytest.raises(InvalidSpeakerError) as caught:
        NewSpeaker(**({"name": "x", "consent": "yes"} | fields))
    assert caught.value.field == field


LONGEST: dict[str, Any] = {
    "consent": "c" * 512,
    "ref_text": "王" * 2000,
    "description": "d" * 2000,
    "original_filename": "f" * 255,
    "mime_type": "m" * 127,
}


@pytest.mark.every_backend
def test_what_was_accepted_before_a_rule_is_taken_over_used_and_deleted(store):
    register_vector(store, "of today", **LONGEST)
    longer: dict[str, Any] = {field: text + "+" for field, text in LONGEST.items()}
    for name in ("default", "adm\u200bin"):
        record = register_vector(store, name, taken_over=True, **longer)
        assert store.find(name).record == record
        assert {field: getattr(record, field) for field in longer} == longer
        delete(store, name)
        assert store.find(name) is None


def test_an_immutable_voice_gets_its_lost_clip_back_and_nothing_else(open_here):
    store = open_here(registration_policy="immutable")
    record = register(store, "Ana", 0, ref_text="words").record
    with store.database.write() as db:
        stored_files.remove(db, address(0), [AUDIO])
    assert store.is_lost(record)
    for number, ref_text in ((1, "words"), (0, "other words")):
        with pytest.raises(SpeakerExistsError, match="'Ana'"):
            register(store, "Ana", number, ref_text=ref_text)
    again = register(store, "Ana", 0, ref_text="words").record
    assert again.speaker_id == record.speaker_id
    assert not store.is_lost(again)
    assert store.read_audio(address(0)) is not None


@pytest.mark.every_backend
def test_nobody_is_found_and_deleting_nobody_says_so(store):
    for name in ("nobody", "\ud800", "\0"):
        assert store.find(name) is None
        assert store.progress(name) is None
        with pytest.raises(SpeakerNotFoundError):
            store.registrations.delete(name)


@pytest.mark.every_backend
def test_search_takes_its_text_literally(store):
    for name in ("100%", "100x", "a_b", "aXb", "Straße"):
        register_vector(store, name)

    def names(**query):
        return store.names(Page(**query))

    assert names(limit=9, search="0%") == ["100%"]
    assert names(limit=9, search="A_B") == ["a_b"]
    assert names(limit=9, search="SS") == ["Straße"]
    assert names(limit=9, search="100", after="100%") == ["100x"]
    with pytest.raises(InvalidSpeakerError):
        names(limit=9, search="\0")


@pytest.mark.every_backend
def test_verify_finds_rows_that_cannot_be_right(open_here, tmp_path):
    store = opened(tmp_path / "other")
    register_vector(store, "ana")
    with store.database.write() as db:
        db.execute(text("UPDATE speaker SET name_key = 'Ana'"))
        db.execute(text("INSERT INTO usage VALUES ('inline', 1, 5, 5)"))
    found = "\n".join(store.verify())
    store.close()
    assert "'ana' (1): its key is 'Ana'" in found
    assert "usage of inline, audio" in found


@pytest.mark.sqlite
def test_a_closed_store_says_so_and_leaves_no_log(tmp_path):
    store = opened(tmp_path)
    register_vector(store, "ana")
    store.close()
    store.close()
    with pytest.raises(StorageError, match="is closed"):
        store.find("ana")
    assert not (tmp_path / "catalogue.sqlite3-wal").exists()


@pytest.mark.sqlite
def test_emptying_the_log_says_whether_it_was_done(store):
    """SQLite answers that it was busy, and nobody read that."""
    database, log = store.database, store.directory / f"{FILE_NAME}-wal"
    register_vector(store, "ana")
    with database.snapshot() as db:
        db.execute(text("SELECT name FROM speaker")).all()
        delete(store, "ana")
        assert database.backend.wipe_log() is False
        assert log.stat().st_size > 0
    assert database.backend.wipe_log() is True
    assert log.stat().st_size == 0


@pytest.mark.sqlite
def test_a_connection_never_crosses_a_fork(store):
    register(store, "ana")
    before = open_files(store.directory / FILE_NAME)
    assert before
    if (child := os.fork()) == 0:
        inherited = open_files(store.directory / FILE_NAME)
        seen = store.find("ana") is not None
        register(store, "from the child", 1)
        os._exit(0 if seen and not inherited else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert store.find("from the child") is not None  # which keeps one
    kept = store.database.kept.copy()
    database._abandon_in_child()  # kept by another thread since the preparations
    assert kept and not store.database.kept
    assert kept[0].cursor().execute("SELECT 1")  # it is not closed


@pytest.mark.sqlite
def test_lookup_cost_does_not_grow_with_the_catalogue(store):
    fill(store, 30_000)
    for name in ("s00000", "s15000", "nobody"):
        assert median_seconds(lambda name=name: store.find(name)) < 1e-3
    result = store.find("s15000")
    assert result.fingerprints == {"e" * 64, "f" * 64}
    record = store.records(Page(limit=1, after="s29997"))[0]
    assert record.name == "s29998"
    page = Page(limit=50, after="s20000")
    assert median_seconds(lambda: store.records(page)) < 5e-3
    empty(store)


@pytest.mark.sqlite
def test_what_is_in_the_directory_is_for_its_owner_only(store):
    register(store, "ana")
    store.participants.join()
    store.store_inline(clip(1))
    paths = [store.directory, *store.directory.rglob("*")]
    files = {f"catalogue.sqlite3{suffix}" for suffix in ("", "-wal", "-shm")}
    assert files <= {path.name for path in paths}
    assert [path for path in paths if path.stat().st_mode & 0o077] == []


@pytest.mark.sqlite
def test_an_open_database_of_others_is_made_private(tmp_path):
    path = tmp_path / "catalogue.sqlite3"
    path.touch(0o644)
    opened(tmp_path).close()
    assert path.stat().st_mode & 0o777 == 0o600


def median_seconds(call) -> float:
    def once() -> float:
        start = time.thread_time()
        call()
        return time.thread_time() - start

    return sorted(once() for _ in range(51))[25]


def empty(store: SpeakerStore) -> None:
    with store.database.write() as db:
        db.execute(speaker.delete())
        db.execute(stored_file.delete())


def open_files(path) -> list[str]:
    links = []
    for handle in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the handle of the listing itself
            links.append(str(handle.readlink()))
    return [link for link in links if link.startswith(str(path))]
