"""VoxCPM2's reference encoders, and nothing but what they read of a checkpoint."""

import dataclasses
import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.errors import CheckpointError, EncodeError
from vllm_tts_cache.families.networks.resample import resample
from vllm_tts_cache.families.voxcpm2.encoders import (
    AudioVAEEncoder,
    load_reference_encoders,
)
from vllm_tts_cache.families.voxcpm2.family import CONTINUATION, FAMILY, REFERENCE
from vllm_tts_cache.families.voxcpm2.positions import num_positions

CPU = torch.device("cpu")


def noisy_tone(num_samples, rate_hz, seed=0):
    rng = np.random.default_rng(seed)
    tone = np.sin(2 * np.pi * (150 + 40 * seed) * np.arange(num_samples) / rate_hz)
    samples = 0.2 * tone + 0.05 * rng.standard_normal(num_samples)
    return samples.astype(np.float32)


def audio(num_samples, rate_hz=16_000, seed=0):
    return ReferenceAudio.of(noisy_tone(num_samples, rate_hz, seed), rate_hz)


def load(directory) -> dict[str, AudioVAEEncoder]:
    found = load_reference_encoders(directory, CPU)
    return {name: e for name, e in found.items() if isinstance(e, AudioVAEEncoder)}


def features_of(encoder, given):
    return encoder.encode(given)["features"]


def fingerprints(directory):
    return {name: e.fingerprint for name, e in load(directory).items()}


@pytest.fixture(scope="module")
def encoders(voxcpm2_checkpoint):
    return load(voxcpm2_checkpoint)


class Copy:
    """A copy of what the encoders are read from, to be spoiled."""

    def __init__(self, original, directory):
        self.directory = directory
        self.config = json.loads((original / "config.json").read_text())
        self.tensors = torch.load(original / "audiovae.pth")["state_dict"]

    def save(self, state=None):
        (self.directory / "config.json").write_text(json.dumps(self.config))
        state = {"state_dict": self.tensors} if state is None else state
        torch.save(state, self.directory / "audiovae.pth")
        return self.directory


@pytest.fixture
def copy(voxcpm2_checkpoint, tmp_path):
    return Copy(voxcpm2_checkpoint, tmp_path)


# What they give


def test_each_mode_needs_one_of_the_encoders_that_are_loaded(encoders):
    assert REFERENCE.encoders == ("reference",)
    assert CONTINUATION.encoders == ("continuation",)
    assert tuple(encoders) == FAMILY.encoders


def test_features_are_four_latents_of_64_for_each_position(encoders):
    for encoder in encoders.values():
        features = features_of(encoder, audio(10 * 16_000))
        assert (features.dtype, features.shape) == (np.float32, (63, 4, 64))
        assert features.flags.c_contiguous


def test_both_are_one_network_that_lies_in_memory_once(encoders):
    reference, continuation = encoders.values()
    assert reference.network is continuation.network
    assert reference.fingerprint != continuation.fingerprint


def test_a_clip_of_whole_positions_is_the_same_to_both(encoders):
    reference, continuation = (features_of(e, audio(25_600)) for e in encoders.values())
    assert np.array_equal(reference, continuation)


def test_silence_follows_a_reference_and_goes_before_a_continuation(encoders):
    samples, silence = noisy_tone(20_000, 16_000), np.zeros(480, np.float32)
    after = ReferenceAudio.of(np.concatenate([samples, silence]), 16_000)
    before = ReferenceAudio.of(np.concatenate([silence, samples]), 16_000)
    given = ReferenceAudio.of(samples, 16_000)
    reference, continuation = (features_of(e, given) for e in encoders.values())
    assert np.array_equal(reference, features_of(encoders["reference"], after))
    assert np.array_equal(continuation, features_of(encoders["continuation"], before))
    assert np.any(reference != continuation, axis=(1, 2)).all()


# 8,463 Hz: see `test_a_rate_at_which_floating_point_...`
@pytest.mark.parametrize(
    ("rate_hz", "num_samples"),
    [(16_000, n) for n in (1, 639, 640, 2_559, 2_560, 2_561, 5_120, 40_961)]
    + [(8_000, 1), (8_000, 1_280), (8_000, 1_281), (8_463, 33_852), (11_025, 7_919)]
    + [(22_050, 3_528), (22_050, 3_529), (24_000, 3_839), (24_000, 3_841)]
    + [(44_100, 7_056), (44_100, 7_057), (44_100, 1), (44_101, 44_101)]
    + [(48_000, 7_680), (48_000, 7_681), (96_000, 15_361), (192_000, 100_003)],
)
def test_positions_are_as_many_as_announced(encoders, rate_hz, num_samples):
    announced = num_positions(num_samples, rate_hz)
    for encoder in encoders.values():
        assert len(features_of(encoder, audio(num_samples, rate_hz))) == announced


@given(st.data(), st.integers(8_000, 192_000))
@settings(max_examples=40, deadline=None)
def test_the_announced_positions_follow_the_resampler_up_to_30_seconds(data, rate_hz):
    num_samples = data.draw(st.integers(1, 30 * rate_hz))
    silence = ReferenceAudio.of(np.zeros(num_samples, np.float32), rate_hz)
    resampled = resample(silence, 16_000)
    assert num_positions(num_samples, rate_hz) == -(-resampled.size // 2_560)


def test_a_rate_at_which_floating_point_makes_a_position_more_than_there_is():
    assert 33_852 * 16_000 == 25 * 2_560 * 8_463
    assert num_positions(33_852, 8_463) == 26


# How exact they are


def test_a_bfloat16_network_gives_other_features(voxcpm2_checkpoint, encoders):
    """So these weights can tell; the tests of identity are worth something."""
    rounded = load(voxcpm2_checkpoint)["reference"].network.bfloat16()
    waveform = torch.from_numpy(noisy_tone(25_600, 16_000)).view(1, 1, -1)
    with torch.no_grad():
        exact = encoders["reference"].network(waveform)
        error = (rounded(waveform.bfloat16()).float() - exact).norm() / exact.norm()
    assert 0.001 < error < 0.2


def test_a_matmul_precision_that_the_engine_lowered_changes_nothing(encoders):
    encoder = encoders["reference"]
    before = features_of(encoder, audio(20_000))
    torch.set_float32_matmul_precision("medium")
    try:
        assert np.array_equal(features_of(encoder, audio(20_000)), before)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_they_are_float32_though_they_load_while_the_default_is_bfloat16(
    voxcpm2_checkpoint, encoders
):
    torch.set_default_dtype(torch.bfloat16)  # as vLLM does while it loads a model
    try:
        loaded = load(voxcpm2_checkpoint)
    finally:
        torch.set_default_dtype(torch.float32)
    network = loaded["reference"].network
    tensors = (*network.parameters(), *network.buffers())
    assert {tensor.dtype for tensor in tensors} == {torch.float32}
    for name, encoder in loaded.items():
        assert encoder.fingerprint == encoders[name].fingerprint
        again = features_of(encoder, audio(20_000))
        assert np.array_equal(again, features_of(encoders[name], audio(20_000)))


def test_only_what_is_read_of_the_network_is_kept(encoders, copy):
    network = encoders["reference"].network
    kept = network.state_dict()
    assert not any("logvar" in name or "weight_" in name for name in kept)
    assert not any(p.requires_grad for p in network.parameters())
    num_kept = sum(tensor.numel() for tensor in kept.values())
    num_given = sum(
        tensor.numel()
        for name, tensor in copy.tensors.items()
        if name.startswith("encoder.") and not name.endswith("weight_g")
    )
    num_spared = 128 * 64 * 3 + 64  # `fc_logvar`
    assert num_kept == num_given - num_spared


def test_an_encoding_does_not_depend_on_what_is_encoded_before_or_beside_it(encoders):
    audios = [audio(16_000 + 1_500 * seed, seed=seed) for seed in range(4)]
    encoder = encoders["continuation"]
    alone = [features_of(encoder, given) for given in audios]
    with ThreadPoolExecutor(4) as pool:
        beside = list(pool.map(lambda given: features_of(encoder, given), audios * 2))
    assert all(np.array_equal(b, alone[i % 4]) for i, b in enumerate(beside))
    assert not np.array_equal(alone[0], alone[1][:7])


def test_loading_draws_no_random_numbers(voxcpm2_checkpoint):
    before = torch.get_rng_state()
    load(voxcpm2_checkpoint)
    assert torch.equal(before, torch.get_rng_state())


def test_a_failure_of_the_network_is_an_error_of_ours(encoders):
    class Broken(torch.nn.Module):
        def forward(self, _):
            raise torch.OutOfMemoryError("CUDA out of memory")

    broken = dataclasses.replace(encoders["reference"], network=Broken())
    with pytest.raises(EncodeError, match=r"AudioVAE encoder: CUDA out of memory"):
        broken.encode(audio(16_000))


def test_the_package_that_the_host_needs_is_not_needed_to_encode(
    voxcpm2_checkpoint, encoders, monkeypatch
):
    for name in [name for name in sys.modules if name.partition(".")[0] == "voxcpm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "voxcpm", None)
    loaded = load(voxcpm2_checkpoint)["reference"]
    expected = features_of(encoders["reference"], audio(20_000))
    assert np.array_equal(features_of(loaded, audio(20_000)), expected)


# What a checkpoint may look like


@pytest.mark.parametrize(
    "wrap", [dict, lambda t: {"state_dict": t, "epoch": 3}], ids=["bare", "wrapped"]
)
def test_a_bare_state_dict_is_read_as_a_wrapped_one_is(copy, encoders, wrap):
    loaded = load(copy.save(wrap(copy.tensors)))["reference"]
    expected = encoders["reference"]
    assert loaded.fingerprint == expected.fingerprint
    again = features_of(loaded, audio(20_000))
    assert np.array_equal(again, features_of(expected, audio(20_000)))


def test_a_legacy_file_that_is_no_archive_loads(copy, voxcpm2_checkpoint):
    path = copy.save() / "audiovae.pth"
    torch.save(copy.tensors, path, _use_new_zipfile_serialization=False)
    assert fingerprints(copy.directory) == fingerprints(voxcpm2_checkpoint)


def test_a_safetensors_file_is_read_and_before_any_other(copy, voxcpm2_checkpoint):
    """As the official package does."""
    path = copy.save({"state_dict": {}}) / "audiovae.safetensors"
    save_file(copy.tensors, path)
    assert fingerprints(copy.directory) == fingerprints(voxcpm2_checkpoint)
    (copy.directory / "audiovae.pth").unlink()
    assert fingerprints(copy.directory) == fingerprints(voxcpm2_checkpoint)


def test_only_the_encoder_is_looked_at(copy, voxcpm2_checkpoint):
    for name in list(copy.tensors):
        if name.startswith(("decoder.", "encoder.fc_logvar.")):
            del copy.tensors[name]
    copy.tensors["discriminator.weight"] = torch.zeros(3)
    copy.config["audio_vae_config"]["out_sample_rate"] = 44_100
    assert fingerprints(copy.save()) == fingerprints(voxcpm2_checkpoint)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.clear(), r"\d+ tensors missing: block\.0\.bias"),
        (lambda t: t.pop("encoder.block.0.bias"), r"1 tensors missing: block\.0\.bias"),
        (
            lambda t: t.pop("encoder.fc_mu.weight_g"),
            r"1 tensors missing: fc_mu\.weight_g",
        ),
        (
            lambda t: t.update({"encoder.fc_mu.bias": torch.zeros(3)}),
            r"another shape: fc_mu\.bias \(3,\) instead of \(64,\)",
        ),
        (
            lambda t: t.update({"encoder.fc_mu.weight_g": torch.ones(1, 1, 1)}),
            r"another shape: fc_mu\.weight_g \(1, 1, 1\) instead of \(64, 1, 1\)",
        ),
        (
            lambda t: t.update({"encoder.fc_mu.bias": "none"}),
            r"missing: fc_mu\.bias",
        ),
    ],
    ids=["empty", "missing", "norm", "misshaped", "broadcast", "text"],
)
def test_a_wrong_set_of_tensors_is_refused_by_name(copy, edit, message):
    edit(copy.tensors)
    with pytest.raises(CheckpointError, match=message) as refused:
        load(copy.save())
    assert "audiovae.pth" in str(refused.value)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"not a torch file"),
        lambda path: path.write_bytes(path.read_bytes()[:100_000]),
        lambda path: torch.save([1, 2], path),
    ],
    ids=["absent", "empty", "text", "head", "list"],
)
def test_a_file_that_is_no_audio_vae_is_refused_by_its_path(copy, spoil):
    spoil(copy.save() / "audiovae.pth")
    with pytest.raises(CheckpointError, match=r"audiovae\.pth"):
        load(copy.directory)


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        ("audio_vae_config", "sample_rate", 44_100, "it has 44100 Hz, 640 samples"),
        ("audio_vae_config", "encoder_rates", [2, 4, 8, 8], "512 samples a latent"),
        (None, "patch_size", 2, "2 latents a patch"),
        ("audio_vae_config", "encoder_dim", "8", r"got `str`.*encoder_dim"),
        ("audio_vae_config", "encoder_rates", [-2, -5, 8, 8], "encoder_rates"),
        ("audio_vae_config", "encoder_dim", 16, "of another shape"),
        ("audio_vae_config", "depthwise", False, "of another shape"),
        (None, "audio_vae_config", 3, "audio_vae_config"),
        (None, "audio_vae_config", None, "of another shape"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(copy, section, field, value, message):
    (copy.config[section] if section else copy.config)[field] = value
    with pytest.raises(CheckpointError, match=message):
        load(copy.save())


def test_rewriting_the_file_changes_nothing_that_is_loaded(copy):
    loaded = load(copy.save())["reference"]
    before = features_of(loaded, audio(16_000))
    path = copy.directory / "audiovae.pth"
    with path.open("r+b") as file:
        file.write(b"\0" * path.stat().st_size)
    assert np.array_equal(features_of(loaded, audio(16_000)), before)


# What the fingerprint is over


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("encoder.block.0.weight_v", True),
        ("encoder.block.4.block.3.alpha", True),
        ("encoder.fc_mu.weight_g", True),
        ("encoder.fc_mu.bias", True),
        ("encoder.fc_logvar.bias", False),
        ("decoder.model.0.bias", False),
    ],
)
def test_the_fingerprints_change_with_every_weight_that_is_read(
    copy, voxcpm2_checkpoint, name, changes
):
    copy.tensors[name].view(-1)[0] += 1
    before, after = fingerprints(voxcpm2_checkpoint), fingerprints(copy.save())
    assert all((before[n] != after[n]) == changes for n in before)


def test_a_copied_checkpoint_has_the_same_fingerprints(voxcpm2_checkpoint, tmp_path):
    copied = shutil.copytree(voxcpm2_checkpoint, tmp_path / "copy")
    assert fingerprints(copied) == fingerprints(voxcpm2_checkpoint)
