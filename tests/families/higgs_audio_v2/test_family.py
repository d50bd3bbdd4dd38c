"""Where the tokenizer of Higgs Audio v2 is found, and whose encodings it shares."""

import numpy as np
import pytest
import torch

from tests.in_process_workers import clip, prepare, store_clip, worker_speakers
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.config import Settings
from vllm_tts_cache.errors import CheckpointError
from vllm_tts_cache.families.higgs_audio_v2.encoders import load_reference_encoders
from vllm_tts_cache.families.higgs_audio_v2.family import (
    FAMILY,
    TOKENIZER_VARIABLES,
    tokenizer_folder,
)
from vllm_tts_cache.families.higgs_audio_v3.encoders import (
    load_reference_encoders as load_those_of_v3,
)
from vllm_tts_cache.families.higgs_audio_v3.family import FAMILY as V3
from vllm_tts_cache.store.opening import open_store

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_elsewhere(monkeypatch, tmp_path):
    """No tokenizer on this machine but what a test puts there."""
    from huggingface_hub import constants

    for variable in TOKENIZER_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def bare(tmp_path):
    """A checkpoint as released: without a tokenizer."""
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "higgs_audio_v2"}')
    return folder


def test_it_is_found_in_the_checkpoint(higgs_audio_v2_checkpoint):
    found = tokenizer_folder(higgs_audio_v2_checkpoint)
    assert found == higgs_audio_v2_checkpoint / "audio_tokenizer"
    assert FAMILY.clones(higgs_audio_v2_checkpoint) is None


@pytest.mark.parametrize("variable", TOKENIZER_VARIABLES)
@pytest.mark.parametrize("part", ["", "audio_tokenizer"])
def test_it_is_found_where_a_variable_says(
    higgs_audio_v2_checkpoint, bare, monkeypatch, variable, part
):
    monkeypatch.setenv(variable, str(higgs_audio_v2_checkpoint / part))
    assert tokenizer_folder(bare) == higgs_audio_v2_checkpoint / "audio_tokenizer"


def test_without_one_it_says_what_to_download(bare):
    assert tokenizer_folder(bare) is None
    reason = FAMILY.clones(bare)
    assert reason is not None and "k2-fsa/OmniVoice" in reason
    with pytest.raises(CheckpointError, match="Download audio_tokenizer/"):
        load_reference_encoders(bare, CPU)


def test_a_folder_of_something_else_is_none(bare):
    folder = bare / "audio_tokenizer"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "encodec"}')
    (folder / "model.safetensors").write_bytes(b"")
    assert tokenizer_folder(bare) is None


@pytest.fixture
def both(higgs_audio_v2_checkpoint, tiny):
    """Encoders of both families, on checkpoints of the same tokenizer."""
    ours = load_reference_encoders(higgs_audio_v2_checkpoint, CPU)
    return ours["codec"], load_those_of_v3(tiny(V3), CPU)["codec"]


def test_both_families_have_one_encoding(both):
    one, other = both
    assert one.fingerprint == other.fingerprint
    samples = np.random.default_rng(0).standard_normal(66_151).astype(np.float32)
    audio = ReferenceAudio.of(0.1 * samples, 22_050)
    codes = [encoder.encode(audio)["codes"] for encoder in both]
    np.testing.assert_array_equal(*codes)


def test_a_clip_that_one_model_encoded_is_not_encoded_again_for_the_other(
    both, tmp_path
):
    samples_dir = tmp_path / "speakers"
    audio = clip(seconds=2.0, rate_hz=24_000)
    store = open_store(Settings(samples_dir=samples_dir))
    ref = store_clip(store, audio)
    store.close()
    num_encodes, codes = [], []
    for encoder in (*both, both[0]):
        speakers = worker_speakers(samples_dir, [encoder])
        prepare(speakers, ref, ["codec"])
        codes.append(speakers.prompt(ref, ["codec"])["codec"]["codes"])
        num_encodes.append(speakers.stats()["encodes"]["codec"])
        speakers.close()
    assert num_encodes == [1, 0, 0]
    np.testing.assert_array_equal(codes[0], codes[1])
