import shutil
import time

import numpy as np
import pytest

from tests.in_process_workers import SpectrumEncoder, clip, ref_of, worker_speakers
from vllm_tts_cache.catalogue.segment import Segment
from vllm_tts_cache.config import Settings
from vllm_tts_cache.errors import EncodeError, EncodeTimeoutError
from vllm_tts_cache.families.qwen3_tts.load import load_reference_encoders
from vllm_tts_cache.store import serde
from vllm_tts_cache.store.audio_wiring import open_audio
from vllm_tts_cache.store.keys import EncodingKey
from vllm_tts_cache.store.wiring import open_disk

NAMES = ("speaker", "codec")
READY = dict.fromkeys(NAMES, "ready")
PENDING = dict.fromkeys(NAMES, "pending")


@pytest.fixture
def encoders():
    return [SpectrumEncoder(name) for name in NAMES]


@pytest.fixture
def speakers(tmp_path, encoders):
    return worker_speakers(tmp_path, encoders)


@pytest.fixture
def restarted(tmp_path):
    """Another worker on the same storage: nothing in memory, nothing counted."""
    return worker_speakers(tmp_path, [SpectrumEncoder(name) for name in NAMES])


@pytest.fixture
def disk(tmp_path):
    return open_disk(Settings(samples_dir=tmp_path))


def store(tmp_path, audio, segment=Segment.REGISTERED):
    open_audio(Settings(samples_dir=tmp_path)).put(audio, segment)
    return ref_of(audio, segment)


@pytest.fixture
def ref(tmp_path):
    return store(tmp_path, clip())


def wait_until_idle(speakers):
    until = time.monotonic() + 10
    while speakers.stats()["in_flight"]:
        assert time.monotonic() < until
        time.sleep(0.002)


def prepare(speakers, ref, *, encodes=True):
    states = speakers.prepare(ref, NAMES, encodes=encodes)
    wait_until_idle(speakers)
    return states


def num_encodes(speakers):
    return sum(speakers.stats()["encodes"].values())


def spectra(speakers, ref):
    found = speakers.prompt(ref, NAMES)
    return {name: encoding["spectrum"] for name, encoding in found.items()}


def test_preparing_returns_at_once_and_encodes_in_the_background(
    speakers, encoders, ref
):
    encoders[0].gate.clear()
    assert speakers.prepare(ref, NAMES, encodes=True) == dict.fromkeys(
        NAMES, "processing"
    )
    assert speakers.stats()["in_flight"] == 2
    encoders[0].gate.set()
    wait_until_idle(speakers)
    assert speakers.states(ref.audio_sha256) == READY
    assert speakers.stats()["encodes"] == {"speaker": 1, "codec": 1}
    assert speakers.stats()["in_place_encodes"] == 0


def test_preparing_again_encodes_nothing(speakers, ref):
    prepare(speakers, ref)
    assert prepare(speakers, ref) == READY
    assert num_encodes(speakers) == 2


def test_only_the_encoders_that_a_mode_needs_run(speakers, ref):
    speakers.prepare(ref, ["speaker"], encodes=True)
    wait_until_idle(speakers)
    assert speakers.stats()["encodes"] == {"speaker": 1, "codec": 0}
    assert speakers.states(ref.audio_sha256) == {"speaker": "ready", "codec": "pending"}


def test_a_rank_that_does_not_encode_finds_what_rank_0_published(
    speakers, restarted, ref
):
    assert prepare(restarted, ref, encodes=False) == PENDING
    prepare(speakers, ref)
    assert prepare(restarted, ref, encodes=False) == READY
    assert num_encodes(restarted) == 0
    assert spectra(restarted, ref).keys() == set(NAMES)


def test_a_prompt_comes_from_memory_then_from_disk_without_an_encode(
    speakers, restarted, ref
):
    prepare(speakers, ref)
    warm = spectra(speakers, ref)
    cold = spectra(restarted, ref)
    assert num_encodes(restarted) == 0
    assert restarted.stats()["hits"]["disk"] == 2
    for name in NAMES:
        np.testing.assert_array_equal(warm[name], cold[name])
    spectra(restarted, ref)
    assert restarted.stats()["hits"] == {"memory": 2, "disk": 2}


def test_a_prompt_that_nothing_prepared_is_encoded_in_place_and_counted(
    speakers, restarted, ref
):
    prepare(speakers, ref)
    expected = spectra(speakers, ref)
    speakers.forget([ref.audio_sha256])
    found = spectra(restarted, ref)
    assert restarted.stats()["in_place_encodes"] == 2
    assert num_encodes(restarted) == 2
    for name in NAMES:
        np.testing.assert_array_equal(found[name], expected[name])


def test_a_worker_that_can_keep_nothing_still_answers(tmp_path, encoders, ref):
    speakers = worker_speakers(tmp_path, encoders, memory_max_bytes=1)
    (tmp_path / "encodings").write_text("a file where the directory should be")
    for num_prompts in (1, 2):
        assert spectra(speakers, ref).keys() == set(NAMES)
        assert num_encodes(speakers) == 2 * num_prompts


def test_preparing_publishes_again_what_was_deleted_from_disk(
    speakers, restarted, disk, tmp_path, ref
):
    prepare(speakers, ref)
    shutil.rmtree(tmp_path / "encodings")
    assert prepare(speakers, ref).keys() == set(NAMES)
    assert num_encodes(speakers) == 2  # memory had them
    spectra(restarted, ref)
    assert num_encodes(restarted) == 0
    assert disk.verify() == []


def test_removing_the_audio_does_not_stop_a_prepared_speaker(
    speakers, restarted, tmp_path, ref
):
    prepare(speakers, ref)
    shutil.rmtree(tmp_path / "audio")
    assert spectra(speakers, ref).keys() == set(NAMES)
    assert spectra(restarted, ref).keys() == set(NAMES)
    assert prepare(speakers, ref) == READY


def test_with_neither_audio_nor_encodings_the_prompt_fails_with_the_reason(
    speakers, tmp_path
):
    ref = ref_of(clip())
    with pytest.raises(EncodeError, match="not stored"):
        speakers.prompt(ref, NAMES)
    failed = "failed: its reference audio is not stored (any more)"
    assert speakers.states(ref.audio_sha256)["speaker"] == failed
    store(tmp_path, clip())
    assert spectra(speakers, ref).keys() == set(NAMES)
    assert speakers.states(ref.audio_sha256) == READY


def test_a_failed_encoder_is_named_with_its_reason_and_tried_again(
    speakers, encoders, ref
):
    encoders[1].errors = [EncodeError("the codec had enough")]
    prepare(speakers, ref)
    assert speakers.states(ref.audio_sha256) == {
        "speaker": "ready",
        "codec": "failed: the codec had enough",
    }
    prepare(speakers, ref)
    assert speakers.states(ref.audio_sha256) == READY
    assert speakers.stats()["encodes"] == {"speaker": 1, "codec": 1}


def test_an_encoder_that_hangs_fails_the_prompt_in_time(tmp_path, encoders, ref):
    speakers = worker_speakers(tmp_path, encoders, timeout_seconds=0.05)
    encoders[0].gate.clear()
    try:
        with pytest.raises(EncodeTimeoutError, match=r"speaker .* within 0\.05 s"):
            speakers.prompt(ref, ["speaker"])
    finally:
        encoders[0].gate.set()
        wait_until_idle(speakers)


def test_forgetting_drops_every_tier_and_only_this_speaker(
    speakers, disk, tmp_path, ref
):
    other = store(tmp_path, clip(1))
    prepare(speakers, ref)
    prepare(speakers, other)
    assert speakers.forget([ref.audio_sha256]) == 4  # two encoders, two tiers
    assert speakers.states(ref.audio_sha256) == PENDING
    assert speakers.states(other.audio_sha256) == READY
    assert speakers.forget([ref.audio_sha256]) == 0
    assert disk.verify() == []


def test_what_is_forgotten_while_it_is_encoded_is_not_kept(
    speakers, encoders, ref, disk
):
    encoders[0].gate.clear()
    speakers.prepare(ref, ["speaker"], encodes=True)
    assert encoders[0].entered.wait(10)
    speakers.forget([ref.audio_sha256])
    encoders[0].gate.set()
    wait_until_idle(speakers)
    assert speakers.states(ref.audio_sha256)["speaker"] != "ready"
    assert disk.verify() == []


def test_a_registered_speaker_promotes_what_was_inline(speakers, tmp_path):
    inline = store(tmp_path, clip(), Segment.INLINE)
    prepare(speakers, inline)
    registered = store(tmp_path, clip())
    spectra(speakers, registered)
    tiers = speakers.stats()["tiers"]
    for tier in tiers.values():
        assert tier["segments"]["registered"]["entries"] == 2
        assert tier["segments"]["inline"]["entries"] == 0
    assert num_encodes(speakers) == 2


def test_an_encoding_is_told_in_its_stored_form_from_memory_and_from_disk(
    speakers, restarted, ref
):
    prepare(speakers, ref)
    key = EncodingKey(
        audio_sha256=ref.audio_sha256,
        encoder_fingerprint=speakers.fingerprints["speaker"],
    )
    expected = spectra(speakers, ref)["speaker"]
    blobs = [
        worker.stored_encoding(ref.audio_sha256, "speaker")
        for worker in (speakers, restarted)
    ]
    assert blobs[0] == blobs[1]
    found = serde.decode(blobs[0], key)["spectrum"]
    np.testing.assert_array_equal(found, expected)
    assert num_encodes(restarted) == 0


def test_an_encoding_that_no_tier_has_is_told_as_none_and_not_encoded(speakers, ref):
    assert speakers.stored_encoding(ref.audio_sha256, "speaker") is None
    assert speakers.stats()["in_flight"] == 0
    assert num_encodes(speakers) == 0


def test_failed_prompts_are_counted(speakers):
    speakers.count_failed_prompt()
    assert speakers.stats()["failed_prompts"] == 1


def test_the_real_encoders_give_the_same_bytes_in_the_background_and_in_place(
    qwen3_checkpoint, tmp_path
):
    import torch

    encoders = load_reference_encoders(qwen3_checkpoint, torch.device("cpu"))
    results = []
    for directory in (tmp_path / "background", tmp_path / "in-place"):
        ref = store(directory, clip(rate_hz=24_000))
        speakers = worker_speakers(directory, encoders.values(), timeout_seconds=60)
        if directory.name == "background":
            prepare(speakers, ref)
        results.append(speakers.prompt(ref, NAMES))
        in_place = speakers.stats()["in_place_encodes"]
        assert in_place == (0 if directory.name == "background" else 2)
    for name, array in (("speaker", "speaker_embedding"), ("codec", "codes")):
        np.testing.assert_array_equal(results[0][name][array], results[1][name][array])
