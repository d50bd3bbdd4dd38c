from benchmarks import fresh_process
from benchmarks.measure import in_fresh_process
from benchmarks.storage import (
    REGISTERED,
    OurStorage,
    encoding_of,
    key_of,
    speaker_name,
    write_stock,
    write_voices,
)
from vllm_tts_cache.speaker.family import default_family
from vllm_tts_cache.testing.tiny_checkpoint import TinyCheckpoint

PROCESS = fresh_process.__name__


def test_churn_stays_within_its_budget_and_leaves_nothing(tmp_path):
    budget = 4 * 1024**2
    found = in_fresh_process(PROCESS, "churn", tmp_path / "d", 400, budget)
    assert 0 < found["largest_memory_bytes"] <= budget
    assert found["evictions"] > 0
    found["left"].pop("descriptors")  # connections that a thread opened late
    assert {what: n for what, n in found["left"].items() if n > 0} == {}


def test_synthetic_voices_are_found_read_and_listed_and_survive_a_recovery(tmp_path):
    write_voices(tmp_path / "many", 250)
    # Nothing is wrong but the empty audio: rows, sums and encodings are right.
    storage = OurStorage(tmp_path / "many")
    problems = storage.verify()
    assert len(problems) == 250
    assert all("audio.safetensors" in line for line in problems)
    storage.close()
    given = ("start", "ours", tmp_path / "many", "--starts", 2)
    found = in_fresh_process(PROCESS, *given)
    assert len(found["start_ms"]) == 2
    assert found["page_ms"] > 0 and found["look_up_p99_ms"] > 0
    storage = OurStorage(tmp_path / "many")
    assert (storage.count(), storage.num_registered_files()) == (250, 3 * 250)
    record = storage.find(speaker_name(249))
    for name in ("speaker", "codec"):
        stored = storage.read(key_of(record.audio_sha256, name))
        right = encoding_of(record.audio_sha256, name)
        assert stored["values"].tobytes() == right["values"].tobytes()
    storage.close()


def test_a_registered_voices_encoding_is_found_in_memory_and_on_disk(tmp_path):
    write_voices(tmp_path / "one", 1)
    storage = OurStorage(tmp_path / "one")
    key = key_of(storage.find(speaker_name(0)).audio_sha256, "codec")
    for _ in range(2):
        assert storage.get(key, REGISTERED) is not None
    assert storage.memory()[0] == storage.read(key).num_bytes
    assert storage.path(key).is_file()
    storage.close()


def test_synthetic_voices_of_stock_are_what_stock_writes(tmp_path):
    write_stock(tmp_path / "stock", 3)
    storage = OurStorage(tmp_path / "stock")  # which imports them
    assert [r.name for r in storage.page(10, "")] == [speaker_name(n) for n in range(3)]
    storage.close()


def test_encoders_are_loaded_with_the_hashes_of_their_weights(tmp_path):
    checkpoint = TinyCheckpoint.of(default_family()).ensure(tmp_path / "tiny")
    found = in_fresh_process(PROCESS, "encoders", checkpoint, tmp_path / "d")
    assert found["seconds"] > 0
    assert (tmp_path / "d").is_dir()
