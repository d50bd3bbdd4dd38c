"""Several servers have one catalogue on PostgreSQL, and one directory."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import store_samples
from tests.contract.catalogue.test_catalogue_processes import in_processes
from vllm_tts_cache.catalogue import schema
from vllm_tts_cache.catalogue.database import Database
from vllm_tts_cache.catalogue.pages import Page
from vllm_tts_cache.catalogue.postgres import PostgresServer
from vllm_tts_cache.errors import SpeakerExistsError
from vllm_tts_cache.store.speaker_store import SpeakerStore, StoredSpeaker

pytestmark = pytest.mark.postgresql
HOSTILE = (
    "'; DROP TABLE speaker; --",
    '"quoted" %s %(name)s {} $1 :name',
    "100%",
    "a_b",
    "Zoë",
    "ZOE\u0308 2",
    "İstanbul",
    "ﬁ",
    "王小明",
    "🎤👩‍🚀",
    "\U0001d504",  # beyond 16 bits
    "-1",
    "null",
    "x" * 128,
    "é" * 128,
)


def found(store: SpeakerStore, name: str) -> StoredSpeaker:
    result = store.find(name)
    assert result is not None
    return result


def prepare(index: int, url: str) -> str:
    database = Database(PostgresServer(url), Path())
    database.prepare()
    database.close()
    return "ok"


def test_processes_that_prepare_a_new_database_at_once_take_turns(postgres):
    url = postgres.make("new")
    assert in_processes(prepare, url, num_processes=4) == ["ok"] * 4
    database = Database(PostgresServer(url), Path())
    with database.read() as db:
        found = db.execute(schema.schema_version.select()).all()
        assert found == [(schema.VERSION,)]
    database.close()


def register_in_threads(index: int, directory, policy) -> list:
    store = store_samples.opened(directory, registration_policy=policy)
    begin = threading.Barrier(8)

    def one(n: int):
        begin.wait()
        try:
            return store_samples.register(store, "Ann", n % 2).record.generation
        except SpeakerExistsError:
            return None

    with ThreadPoolExecutor(8) as threads:
        return list(threads.map(one, range(8)))


@pytest.mark.parametrize(
    ("policy", "num_registered"), [("immutable", 1), ("overwrite", 16)]
)
def test_one_name_registered_at_once_is_one_voice(tmp_path, policy, num_registered):
    answers = in_processes(register_in_threads, tmp_path, policy, num_processes=2)
    given = [generation for each in answers for generation in each]
    registered = [generation for generation in given if generation is not None]
    assert len(registered) == len(set(registered)) == num_registered
    store = store_samples.opened(tmp_path)
    assert store.num_speakers() == 1
    assert found(store, "ann").record.generation == max(registered)
    store.recover()  # what was replaced
    assert store.verify() == []
    store.close()


@pytest.mark.sqlite
def test_hostile_names_are_names_like_others_in_the_order_of_code_points(tmp_path):
    store = store_samples.opened(tmp_path)
    for name in HOSTILE:
        labels = {"said": name} if name.isprintable() else {"100%": ":n"}
        store.registrations.register(
            store_samples.voice(name, None, labels=labels), None
        )
    names = [found(store, name).record.name for name in HOSTILE]
    assert names == list(HOSTILE)
    listed = store.records(Page(limit=99))
    keys = [record.name_key for record in listed]
    assert keys == sorted(keys) and len(keys) == len(HOSTILE)
    for record in listed:
        page = Page(limit=99, search=record.name, labels=record.labels)
        assert store.names(page) == [record.name]
        behind = store.names(Page(limit=99, after=record.name))
        assert behind == [r.name for r in listed if r.name_key > record.name_key]
    for name in HOSTILE:
        store_samples.delete(store, name)
    assert store.num_speakers() == 0
    store.close()
