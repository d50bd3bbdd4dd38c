"""The Higgs Audio tokenizer that several families share: transformers' codes."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import HiggsAudioV2TokenizerModel

from vllm_tts_cache.errors import CheckpointError
from vllm_tts_cache.families.networks.higgs_tokenizer.tiny import write_tokenizer
from vllm_tts_cache.families.networks.higgs_tokenizer.tokenizer import (
    load_higgs_tokenizer,
)

CPU = torch.device("cpu")
# Whole hops, a sample more and less, and both sides of where the acoustic half would
# give a frame less than the semantic half.
LENGTHS = (960, 1_700, 24_000, 24_001, 24_479, 24_480, 24_481, 24_959, 72_017, 241_001)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    written = tmp_path_factory.mktemp("higgs") / "audio_tokenizer"
    write_tokenizer(written, encoders="tiny", seed=0)
    return written


@pytest.fixture(scope="module")
def theirs(directory):
    return HiggsAudioV2TokenizerModel.from_pretrained(directory).eval()


@pytest.fixture
def copied(directory, tmp_path):
    copy = tmp_path / "audio_tokenizer"
    copy.mkdir()
    for file in directory.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def load(directory, *, resampler="none", **preparation):
    return load_higgs_tokenizer(
        directory, CPU, resampler=resampler, preparation=preparation
    )


@pytest.fixture(scope="module")
def ours(directory):
    return load(directory)


def speech(num_samples, seed=0):
    """Samples that are loud and quiet by turns, so that frames differ."""
    rng = np.random.default_rng(seed)
    seconds = np.arange(num_samples) / 24_000
    voiced = np.sin(2 * np.pi * 180 * seconds) * (1 + np.sin(2 * np.pi * 3 * seconds))
    noisy = 0.2 * voiced + 0.05 * rng.standard_normal(num_samples)
    return noisy.astype(np.float32)


@pytest.mark.parametrize("num_samples", LENGTHS)
def test_codes_are_those_of_transformers(num_samples, ours, theirs):
    samples = speech(num_samples)
    with torch.inference_mode():
        waveform = torch.from_numpy(samples).view(1, 1, -1)
        expected = theirs.encode(waveform, return_dict=False)[0].T.numpy()
    codes = ours.codes(samples)
    assert codes.dtype == np.int16
    assert codes.shape == (expected.shape[0], 8)
    np.testing.assert_array_equal(codes, expected)


@pytest.mark.parametrize("num_samples", [24_000, 72_017])
def test_what_is_quantised_is_equal_bit_for_bit(num_samples, ours, theirs):
    """Codes alone would hide a small difference, up to the clip that shows it."""
    waveform = torch.from_numpy(speech(num_samples)).view(1, 1, -1)
    with torch.inference_mode():
        features = theirs._extract_semantic_features(waveform).transpose(1, 2)
        assert torch.equal(
            ours.network._semantic(waveform), theirs.encoder_semantic(features)
        )
        assert torch.equal(
            ours.network.acoustic_encoder(waveform), theirs.acoustic_encoder(waveform)
        )


def test_each_codebook_tells_frames_and_clips_apart(ours):
    """Else equal codes would show nothing."""
    codes, others = ours.codes(speech(72_017)), ours.codes(0.9 * speech(72_017))
    for book, other in zip(codes.T, others.T, strict=True):
        assert len(set(book.tolist())) > 10
        assert (book != other).mean() > 0.2


def test_it_draws_no_random_number(ours):
    """Transformers' does, and would shift what an unseeded request draws."""
    before = torch.get_rng_state()
    ours.codes(speech(24_000))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_clip_has_the_same_codes_in_every_run(ours):
    first = ours.codes(speech(48_000))
    ours.codes(speech(30_001, seed=1))
    np.testing.assert_array_equal(ours.codes(speech(48_000)), first)


def test_the_older_names_of_a_normed_weight_are_read_as_well(copied, ours):
    path = copied / "model.safetensors"
    names = {"original0": "weight_g", "original1": "weight_v"}
    renamed = {}
    for name, tensor in load_file(path).items():
        for new, old in names.items():
            name = name.replace(f"parametrizations.weight.{new}", old)  # noqa: PLW2901
        renamed[name] = tensor
    assert sum("weight_g" in name for name in renamed) == 1
    save_file(renamed, path)
    assert load(copied).fingerprint == ours.fingerprint


def test_a_family_that_does_something_else_before_has_encodings_of_its_own(directory):
    known = {
        load(directory, resampler=resampler, **preparation).fingerprint
        for resampler in ("soxr_hq", "torchaudio")
        for preparation in ({}, {"revision": 1}, {"revision": 2})
    }
    assert len(known) == 6


def test_families_that_do_the_same_share_encodings(directory, copied):
    one = load(directory, resampler="soxr_hq", revision=1)
    other = load(copied, resampler="soxr_hq", revision=1)
    assert one.fingerprint == other.fingerprint


def test_what_only_decoding_reads_is_not_in_it(copied, ours):
    path = copied / "model.safetensors"
    decode_side = ("acoustic_decoder.", "decoder_semantic.", "fc1.", "fc2.")
    unread = (*decode_side, "quantizer.quantizers.7.project_out.")
    tensors = {
        name: tensor + 1 if name.startswith(unread) else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path)
    assert load(copied).fingerprint == ours.fingerprint


def change_config(directory, section, **values):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    (config[section] if section else config).update(values)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("section", "values", "named"),
    [
        ("", {"model_type": "encodec"}, "encodec"),
        ("", {"codebook_size": 65_536}, "16 bits"),
        ("", {"strides": [1]}, "strides"),
        ("", {"sample_rate": "fast"}, "sample_rate"),
        ("semantic_model_config", {"feat_extract_norm": "layer"}, "layer"),
        ("semantic_model_config", {"do_stable_layer_norm": True}, "HuBERT"),
        ("semantic_model_config", {"hidden_act": "relu"}, "relu"),
        ("semantic_model_config", {"conv_kernel": [10, 3]}, "conv_kernel"),
        ("acoustic_model_config", {"hidden_size": 128}, "another shape"),
    ],
)
def test_a_tokenizer_that_is_built_otherwise_is_refused(section, values, named, copied):
    change_config(copied, section, **values)
    with pytest.raises(CheckpointError, match=named):
        load(copied)


def test_a_tensor_that_is_missing_is_named(copied):
    path = copied / "model.safetensors"
    tensors = load_file(path)
    del tensors["fc.weight"]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"missing: fc\.weight"):
        load(copied)


def test_a_folder_that_is_not_there_is_said(tmp_path):
    with pytest.raises(CheckpointError, match="absent"):
        load(tmp_path / "absent")
