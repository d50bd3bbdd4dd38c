"""Databases of earlier schemas become today's."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import inspect

from tests.store_samples import opened
from vllm_tts_cache.catalogue import migrations
from vllm_tts_cache.catalogue.catalogue import FILE_NAME
from vllm_tts_cache.catalogue.ids import is_voice_id
from vllm_tts_cache.catalogue.pages import Page
from vllm_tts_cache.errors import StorageError
from vllm_tts_cache.store.locks import Presence

pytestmark = pytest.mark.sqlite
V1 = Path(__file__).with_name("schema_v1.sql")
NUM_VOICES = 1_234  # more than one statement takes


def write_v1(directory):
    directory.mkdir()
    with closing(sqlite3.connect(directory / FILE_NAME)) as db:
        db.executescript(V1.read_text())
        rows = [(f"Voice {n}".casefold(), f"Voice {n}", n) for n in range(NUM_VOICES)]
        db.executemany(
            "INSERT INTO speaker (tenant, name_key, name, num_samples, sample_rate_hz,"
            " consent, description, created_at, embedding) VALUES"
            " ('default', ?, ?, 0, 0, 'yes', 'WARM', ?, x'0000003f')",
            rows,
        )
        db.commit()


def found(store, name):
    speaker = store.find(name)
    assert speaker is not None
    return speaker.record


def test_a_catalogue_without_ids_gets_them_once(tmp_path):
    write_v1(tmp_path / "voices")
    store = opened(tmp_path / "voices")
    record = found(store, "voice 7")
    assert (record.created_at, record.labels, record.is_pinned) == (7.0, {}, False)
    assert store.catalogue.speaker_embedding(record) == (0.5,)
    records = store.catalogue.records(Page(limit=2 * NUM_VOICES))
    ids = {each.speaker_id for each in records}
    assert len(ids) == NUM_VOICES and all(map(is_voice_id, ids))
    assert found(store, record.speaker_id) == record
    searched = store.catalogue.names(Page(limit=2, search="warm"))
    assert searched == ["Voice 0", "Voice 1"]
    assert store.verify() == []
    store.close()
    again = opened(tmp_path / "voices")
    assert found(again, "voice 7") == record
    again.close()


def test_a_migrated_catalogue_has_what_a_new_one_has(tmp_path):
    """Columns and indexes by name; a column that was added stands last."""
    write_v1(tmp_path / "voices")
    shapes = []
    for directory in (tmp_path / "voices", tmp_path / "new"):
        store = opened(directory)
        with store.catalogue.database.read() as db:
            assert migrations.stored_version(db) == migrations.VERSION
            seen = inspect(db)
            shapes.append(
                {
                    table: (
                        {column["name"] for column in seen.get_columns(table)},
                        {
                            (index["name"], *index["column_names"], index["unique"])
                            for index in seen.get_indexes(table)
                        },
                    )
                    for table in seen.get_table_names()
                }
            )
        store.close()
    assert shapes[0] == shapes[1]


def test_nothing_is_migrated_under_a_server_that_is_at_work(tmp_path):
    """An old one would set the audio of a voice of several clips aside as damaged."""
    write_v1(tmp_path / "voices")
    (tmp_path / "voices" / "participants").mkdir()
    older = Presence(tmp_path / "voices" / "participants", ".lock")
    with pytest.raises(StorageError, match="Stop that server"):
        opened(tmp_path / "voices")
    with closing(sqlite3.connect(tmp_path / "voices" / FILE_NAME)) as db:
        assert db.execute("SELECT version FROM schema_version").fetchone() == (1,)
    older.end()
    opened(tmp_path / "voices").close()


def test_a_process_of_the_older_version_changes_nothing_any_more(tmp_path):
    """It would write voices without an id, and delete what it knows no owner of."""
    older = (
        """INSERT INTO speaker (tenant, name_key, name, num_samples, sample_rate_hz,
        consent, created_at, embedding) VALUES
        ('default', 'new', 'new', 0, 0, 'yes', 0, x'0000003f')""",
        """INSERT INTO deletion (name_hash, requested_at, files_removed)
        VALUES ('hash', 0, 0)""",
    )
    write_v1(tmp_path / "voices")
    for directory in (tmp_path / "voices", tmp_path / "new"):
        opened(directory).close()
        with closing(sqlite3.connect(directory / FILE_NAME)) as db:
            for statement in older:
                with pytest.raises(sqlite3.IntegrityError, match="stop this server"):
                    db.execute(statement)
