import os
import sqlite3
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from vllm_tts_cache.catalogue.record import NewSpeaker
from vllm_tts_cache.catalogue.registry import Registry
from vllm_tts_cache.errors import (
    InvalidSpeakerError,
    SpeakerExistsError,
    SpeakerLimitError,
    StorageError,
)


def speaker(name: str, audio: str = "a", **fields) -> NewSpeaker:
    given: dict[str, Any] = {"audio_sha256": audio, "num_samples": 48000}
    given |= {"sample_rate_hz": 24000, "consent": "yes"} | fields
    return NewSpeaker(name=name, **given)


def test_a_speaker_comes_back_as_it_was_registered(registry):
    before = time.time()
    fields = {
        "ref_text": "guten Tag",
        "description": "warm",
        "mime_type": "audio/flac",
        "original_filename": "zoë.flac",
        "file_size": 1234,
    }
    record = registry.register(speaker(" Zoë ", **fields)).record
    assert registry.get("ZOË") == record
    assert (record.name, record.name_key, record.tenant) == ("Zoë", "zoë", "default")
    assert {field: getattr(record, field) for field in fields} == fields
    assert before <= record.created_at <= time.time()
    assert (record.seconds, record.embedding_dim) == (2.0, None)
    assert registry.speaker_embedding(record) is None


def test_an_embedding_keeps_its_float32_values(registry):
    values = (0.5, -1.25, 3.0)
    new = NewSpeaker(name="x", consent="yes", embedding=values)
    record = registry.register(new).record
    assert (record.embedding_dim, record.audio_sha256, record.seconds) == (3, None, 0.0)
    assert registry.speaker_embedding(record) == values
    registry.delete("x")
    assert registry.speaker_embedding(record) is None


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
        ({"embedding": (1.0,), "name": "a/b"}, "name"),
    ],
)
def test_what_cannot_be_registered_names_its_field(fields, field):
    with pytest.raises(InvalidSpeakerError) as caught:
        NewSpeaker(**({"name": "x", "consent": "yes"} | fields))
    assert caught.value.field == field


def test_registering_a_name_again_replaces_it_and_says_what_was_there(registry):
    first = registry.register(speaker("Ana", "a"))
    second = registry.register(speaker("ANA", "b"))
    assert first.replaced is None
    assert second.replaced == first.record
    assert registry.list(limit=10) == [second.record]


def test_generations_grow_across_names_replacements_and_deletions(registry):
    generations = []
    for name in ("a", "b", "a", "a"):
        generations.append(registry.register(speaker(name)).record.generation)
        registry.delete("a")
    assert generations == sorted(set(generations))


def test_immutable_keeps_what_is_registered(open_registry):
    registry = open_registry(policy="immutable")
    record = registry.register(speaker("Ana", "a")).record
    with pytest.raises(SpeakerExistsError, match="'Ana'"):
        registry.register(speaker("ana", "b"))
    assert registry.get("ana") == record


def test_the_limit_is_for_new_names_only(open_registry):
    registry = open_registry(max_speakers=2)
    registry.register(speaker("a"))
    registry.register(speaker("b", tenant="other"))
    with pytest.raises(SpeakerLimitError):
        registry.register(speaker("c"))
    registry.register(speaker("A", "again"))
    registry.delete("a")
    registry.register(speaker("c"))


def test_tenants_do_not_see_each_other(registry):
    registry.register(speaker("ana", "a"))
    other = registry.register(speaker("ana", "b", tenant="other")).record
    assert registry.delete("ana") is not None
    assert registry.get("ana") is None
    assert registry.get("ana", "other") == other
    assert (registry.count(), registry.count("other")) == (0, 1)


def test_deleting_nobody_is_a_miss(registry):
    assert registry.delete("nobody") is None
    assert registry.get("nobody") is None


def test_half_a_character_is_nobodys_name(registry):
    assert registry.get("\ud800") is None
    assert registry.delete("\ud800") is None
    with pytest.raises(InvalidSpeakerError):
        registry.list(limit=1, search="\ud800")


def test_pages_join_to_the_whole_in_the_order_of_folded_names(registry):
    for name in ("beta", "Alpha", "ähre", "Gamma", "zeta"):
        registry.register(speaker(name))
    pages, after = [], ""
    while page := registry.list(limit=2, after=after):
        pages.append([record.name for record in page])
        after = page[-1].name
    assert pages == [["Alpha", "beta"], ["Gamma", "zeta"], ["ähre"]]
    joined = [name for page in pages for name in page]
    assert registry.names(limit=9) == joined == list(registry.iter_names())
    with pytest.raises(InvalidSpeakerError):
        registry.list(limit=0)


def test_search_takes_its_text_literally(registry):
    for name in ("100%", "100x", "a_b", "aXb", "Straße"):
        registry.register(speaker(name))
    assert registry.names(limit=9, search="0%") == ["100%"]
    assert registry.names(limit=9, search="A_B") == ["a_b"]
    assert registry.names(limit=9, search="SS") == ["Straße"]
    assert registry.names(limit=9, search="100", after="100%") == ["100x"]


def test_audio_is_counted_over_all_tenants(registry):
    registry.register(speaker("a", "one"))
    registry.register(speaker("b", "one", tenant="other"))
    registry.register(NewSpeaker(name="e", consent="yes", embedding=(1.0,)))
    assert registry.references("one") == 2
    assert registry.referenced_audio() == {"one"}
    registry.register(speaker("a", "two"))
    assert (registry.references("one"), registry.references("two")) == (1, 1)


def test_many_names_are_all_iterated(registry):
    fill(registry, 2500)
    assert len(list(registry.iter_names())) == 2500


def test_verify_finds_rows_that_cannot_be_right(tmp_path):
    with Registry(tmp_path / "v.db", max_speakers=0, policy="overwrite") as registry:
        registry.register(speaker("ana"))
        registry.register(speaker("bob"))
        with sqlite3.connect(registry.path) as db:
            db.execute("PRAGMA ignore_check_constraints = ON")
            db.execute("UPDATE speaker SET audio_sha256 = NULL WHERE name = 'ana'")
            db.execute("UPDATE speaker SET name_key = 'Bob' WHERE name = 'bob'")
        db.close()
        found = "\n".join(registry.verify())
    assert "'ana' (1): not one of" in found
    assert "'bob' (2): its key is 'Bob'" in found


def test_reopening_finds_everything(open_registry, tmp_path):
    path = tmp_path / "voices.sqlite3"
    with Registry(path, max_speakers=0, policy="overwrite") as registry:
        record = registry.register(speaker("ana")).record
    assert open_registry().get("ana") == record


def test_a_closed_registry_says_so(tmp_path):
    registry = Registry(tmp_path / "v.db", max_speakers=0, policy="overwrite")
    registry.close()
    registry.close()
    with pytest.raises(StorageError, match="is closed"):
        registry.get("ana")
    assert not (tmp_path / "v.db-wal").exists()


def test_threads_share_a_registry(registry):
    def work(thread: int) -> None:
        for n in range(10):
            registry.register(speaker(f"{thread}-{n}"))
            assert registry.get(f"{thread}-{n}") is not None

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert registry.count() == 40


def test_a_connection_never_crosses_a_fork(registry):
    registry.register(speaker("ana"))
    before = open_files(registry.path)
    assert before
    if (child := os.fork()) == 0:
        inherited = open_files(registry.path)
        found = registry.get("ana") is not None
        registry.register(speaker("from the child"))
        os._exit(0 if found and not inherited else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert registry.get("from the child") is not None


def test_lookup_cost_does_not_grow_with_the_registry(registry):
    fill(registry, 100_000)
    for name in ("s00000", "s50000", "nobody"):
        assert median_seconds(lambda name=name: registry.get(name)) < 1e-3
    record = registry.list(limit=1, after="s99997")[0]
    assert record.name == "s99998"
    assert median_seconds(lambda: registry.list(limit=50, after="s70000")) < 5e-3


def median_seconds(call) -> float:
    def once() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return sorted(once() for _ in range(51))[25]


def fill(registry: Registry, num_speakers: int) -> None:
    values = [(f"s{n:05d}", f"s{n:05d}", f"{n:064x}") for n in range(num_speakers)]
    with sqlite3.connect(registry.path) as db:
        db.executemany(
            "INSERT INTO speaker (tenant, name_key, name, audio_sha256, num_samples,"
            " sample_rate_hz, consent, created_at)"
            " VALUES ('default', ?, ?, ?, 1, 1, 'yes', 0)",
            values,
        )
    db.close()


def open_files(path) -> list[str]:
    links = []
    for handle in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the handle of the listing itself
            links.append(str(handle.readlink()))
    return [link for link in links if link.startswith(str(path))]
