import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.encoding_samples import make_encoding
from tests.in_process_workers import clip
from vllm_tts_cache.catalogue.record import NewSpeaker
from vllm_tts_cache.catalogue.segment import Segment
from vllm_tts_cache.config import Settings
from vllm_tts_cache.entrypoints.storage import open_storage
from vllm_tts_cache.errors import SpeakerExistsError, SpeakerLimitError, StorageError
from vllm_tts_cache.store.keys import EncodingKey


@pytest.fixture
def storage(tmp_path):
    return opened(tmp_path)


def opened(directory, **settings):
    return open_storage(Settings(samples_dir=directory, **settings))


def new(name, audio):
    return NewSpeaker(
        name=name,
        consent="yes",
        audio_sha256=audio.audio_sha256,
        num_samples=audio.num_samples,
        sample_rate_hz=audio.sample_rate_hz,
    )


def register(storage, name, audio):
    return storage.register(new(name, audio), audio)


def encode(storage, audio):
    key = EncodingKey(audio_sha256=audio.audio_sha256, encoder_fingerprint="e" * 64)
    storage.disk.put(key, make_encoding(), Segment.REGISTERED)
    return key


def test_registering_stores_row_and_audio(storage):
    record = register(storage, "Ann", clip()).record
    assert storage.registry.get("ann") == record
    assert storage.audio.get(record.audio_sha256).samples.size == record.num_samples
    assert storage.verify() == []


def test_replacing_says_what_was_replaced_and_touches_none_of_it(storage):
    old = register(storage, "Ann", clip(0)).record
    done = register(storage, "ANN", clip(1))
    assert done.replaced == old
    assert storage.audio.get(old.audio_sha256) is not None
    assert storage.verify() != []  # until somebody releases it
    assert storage.release(old.audio_sha256)
    assert storage.verify() == []


def test_only_audio_that_no_row_has_is_released(storage):
    register(storage, "Ann", clip())
    register(storage, "Bob", clip())
    key = encode(storage, clip())
    storage.registry.delete("Ann")
    assert not storage.release(clip().audio_sha256)
    assert storage.disk.contains(key)
    storage.registry.delete("Bob")
    assert storage.release(clip().audio_sha256)
    assert not storage.disk.contains(key)
    assert storage.audio.path(clip().audio_sha256) is None
    assert storage.verify() == []


def test_releasing_twice_is_harmless(storage):
    assert storage.release(clip().audio_sha256)
    assert storage.release(clip().audio_sha256)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"registration_policy": "immutable"}, SpeakerExistsError),
        ({"max_uploaded": 1}, SpeakerLimitError),
    ],
)
def test_a_refused_registration_leaves_the_old_speaker_whole(tmp_path, settings, error):
    storage = opened(tmp_path, **settings)
    record = register(storage, "Ann", clip(0)).record
    name = "Ann" if error is SpeakerExistsError else "Bob"
    with pytest.raises(error):
        register(storage, name, clip(1))
    assert storage.registry.get("Ann") == record
    assert storage.audio.get(clip(0).audio_sha256) is not None


def test_a_refused_registration_leaves_no_audio_behind(tmp_path):
    storage = opened(tmp_path, registration_policy="immutable")
    register(storage, "Ann", clip(0))
    with pytest.raises(SpeakerExistsError):
        register(storage, "Ann", clip(1))
    assert storage.verify() == []


def test_a_refused_registration_leaves_inline_audio_inline(tmp_path):
    storage = opened(tmp_path, max_uploaded=1)
    register(storage, "Ann", clip(0))
    storage.audio.put(clip(1), Segment.INLINE)
    with pytest.raises(SpeakerLimitError):
        register(storage, "Bob", clip(1))
    assert storage.audio.get(clip(1).audio_sha256) is not None
    assert storage.verify() == []


def test_a_refused_registration_of_a_known_clip_keeps_that_clip(tmp_path):
    storage = opened(tmp_path, registration_policy="immutable")
    register(storage, "Ann", clip(0))
    register(storage, "Bob", clip(1))
    with pytest.raises(SpeakerExistsError):
        register(storage, "Ann", clip(1))
    assert storage.audio.get(clip(1).audio_sha256) is not None
    assert storage.verify() == []


def test_recovering_keeps_what_is_registered_meanwhile(storage, monkeypatch):
    look = storage.registry.referenced_audio

    def look_then_register():
        referenced = look()
        register(opened(storage.directory), "Ann", clip())
        return referenced

    monkeypatch.setattr(storage.registry, "referenced_audio", look_then_register)
    assert storage.recover() == []
    assert storage.audio.get(clip().audio_sha256) is not None
    assert storage.verify() == []


def test_recovering_drops_audio_and_encodings_that_nobody_has(storage):
    kept = register(storage, "Ann", clip(0)).record
    kept_key, orphan_key = encode(storage, clip(0)), encode(storage, clip(1))
    storage.audio.put(clip(1), Segment.REGISTERED)
    assert len(storage.verify()) == 1
    assert storage.recover() == [clip(1).audio_sha256]
    assert storage.verify() == []
    assert storage.recover() == []
    assert storage.disk.contains(kept_key)
    assert not storage.disk.contains(orphan_key)
    assert storage.audio.get(kept.audio_sha256) is not None


def test_recovering_leaves_inline_audio_alone(storage):
    storage.audio.put(clip(), Segment.INLINE)
    assert storage.recover() == []
    assert storage.audio.get(clip().audio_sha256) is not None


def test_verifying_names_what_is_wrong(storage, tmp_path):
    record = register(storage, "Ann", clip(0)).record
    storage.audio.put(clip(1), Segment.REGISTERED)
    path = storage.audio.path(record.audio_sha256)
    path.write_bytes(path.read_bytes()[:-4])
    problems = storage.verify()
    assert len(problems) == 2
    assert any(record.audio_sha256 in problem for problem in problems)
    assert f"audio {clip(1).audio_sha256}: no speaker has it" in problems
    shutil.rmtree(tmp_path / "audio")
    assert storage.verify() == [f"audio {record.audio_sha256}: not stored"]


def test_a_directory_that_cannot_be_made_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        opened(tmp_path / "file" / "voices")


def test_a_second_process_sees_what_the_first_registered(storage, tmp_path):
    record = register(storage, "Ann", clip()).record
    assert opened(tmp_path).registry.get("ANN") == record


def test_registering_and_releasing_one_clip_at_once_never_loses_its_audio(tmp_path):
    """Two servers: one registers names for a clip, one deletes them and releases."""
    one, other, audio = opened(tmp_path), opened(tmp_path), clip()
    names = [f"name {number}" for number in range(3)]
    done = threading.Event()

    def register_again_and_again():
        for name in names * 15:
            register(one, name, audio)
        done.set()

    def release_again_and_again():
        while not done.is_set():
            for name in names:
                other.registry.delete(name)
            other.release(audio.audio_sha256)

    with ThreadPoolExecutor(2) as pool:
        registering = pool.submit(register_again_and_again)
        releasing = pool.submit(release_again_and_again)
        try:
            registering.result(60)
        finally:
            done.set()
        releasing.result(60)
    assert one.verify() == []
    register(one, "the last", audio)
    assert not other.release(audio.audio_sha256)
    assert one.audio.get(audio.audio_sha256) is not None
    assert one.verify() == []


def test_an_embedding_needs_no_audio(storage):
    embedding = replace(
        new("Ann", clip()),
        audio_sha256=None,
        num_samples=0,
        sample_rate_hz=0,
        embedding=(0.5, -1.0),
    )
    record = storage.register(embedding, None).record
    assert storage.registry.speaker_embedding(record) == (0.5, -1.0)
    assert storage.verify() == []
