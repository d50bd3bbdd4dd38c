from benchmarks import written_voices
from benchmarks.measure import in_fresh_process
from benchmarks.written_voices import (
    encoding_of,
    key_of,
    open_ours,
    speaker_name,
    write_stock,
    write_voices,
)
from vllm_tts_cache.catalogue.pages import Page


def test_synthetic_voices_are_found_read_and_listed_and_survive_a_recovery(tmp_path):
    directory = tmp_path / "many"
    write_voices(directory, 250)
    # Nothing is wrong but the empty audio: rows, sums and encodings are right.
    store = open_ours(directory)
    problems = store.verify()
    assert len(problems) == 250
    assert all("audio.safetensors" in line for line in problems)
    store.close()
    found = in_fresh_process(written_voices.__name__, "ours", directory)
    assert found["start_ms"] > 0
    assert found["page_ms"] > 0 and found["look_up_p99_ms"] > 0
    store = open_ours(directory)
    assert store.num_speakers() == 250
    record = store.find(speaker_name(249)).record
    for name in ("speaker", "codec"):
        stored = store.read(key_of(record.audio_sha256, name))
        right = encoding_of(record.audio_sha256, name)
        assert stored["values"].tobytes() == right["values"].tobytes()
    store.close()


def test_synthetic_voices_of_stock_are_what_stock_writes(tmp_path):
    write_stock(tmp_path / "stock", 3)
    store = open_ours(tmp_path / "stock")  # which imports them
    found = [record.name for record in store.records(Page(limit=10))]
    assert found == [speaker_name(number) for number in range(3)]
    store.close()
