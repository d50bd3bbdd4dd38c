import pytest
from sqlalchemy import text

from tests.store_samples import opened, voice
from vllm_tts_cache.catalogue import catalogue, schema
from vllm_tts_cache.files import shared_file_system


def test_a_database_of_an_earlier_schema_is_migrated_once(tmp_path, monkeypatch):
    store = opened(tmp_path)
    store.register(voice("Ann", None), None)
    store.close()

    def add_a_column(db):
        db.execute(text("ALTER TABLE speaker ADD COLUMN colour TEXT"))

    monkeypatch.setattr(schema, "MIGRATIONS", (add_a_column,))
    monkeypatch.setattr(schema, "VERSION", 2)
    for _ in range(2):
        store = opened(tmp_path)
        assert store.find("Ann") is not None
        with store.catalogue.database.read() as db:
            assert schema.stored_version(db) == 2
            db.execute(text("SELECT colour FROM speaker"))
        store.close()


@pytest.mark.parametrize(("kind", "is_local"), [(None, True), ("NFS", False)])
def test_a_directory_that_hosts_may_share_is_warned_about(
    tmp_path, monkeypatch, plugin_log, kind, is_local
):
    monkeypatch.setattr(catalogue, "shared_file_system", lambda _: kind)
    store = opened(tmp_path)
    assert store.catalogue.is_local is is_local
    assert (f"{tmp_path} is on NFS" in plugin_log.text) is not is_local
    store.close()


def test_the_file_system_of_a_directory_is_asked_for(tmp_path):
    assert shared_file_system(tmp_path) is None
    assert shared_file_system(tmp_path / "nowhere") is None
