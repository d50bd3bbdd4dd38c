"""VoxCPM2's reference encoders, and nothing but what they read of a checkpoint."""

import json
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.families.clip import noisy_tone as audio
from vllm_tts_cache.errors import CheckpointError
from vllm_tts_cache.families.voxcpm2.encoders import (
    AudioVAEEncoder,
    load_reference_encoders,
)

CPU = torch.device("cpu")


def load(directory) -> dict[str, AudioVAEEncoder]:
    found = load_reference_encoders(directory, CPU)
    return {name: e for name, e in found.items() if isinstance(e, AudioVAEEncoder)}


def features_of(encoder, given):
    return encoder.encode(given)["features"]


def fingerprints(directory):
    return {name: e.fingerprint for name, e in load(directory).items()}


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
def copy(own_checkpoint, tmp_path):
    return Copy(own_checkpoint, tmp_path)


def test_both_are_one_network_that_lies_in_memory_once(encoders):
    reference, continuation = encoders.values()
    assert reference.network is continuation.network
    assert reference.fingerprint != continuation.fingerprint


def test_the_hosts_package_is_not_needed(own_checkpoint, encoders, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "voxcpm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "voxcpm", None)
    loaded = load(own_checkpoint)["reference"]
    expected = features_of(encoders["reference"], audio(20_000))
    assert np.array_equal(features_of(loaded, audio(20_000)), expected)


def test_a_bare_state_dict_and_an_older_form_are_read_alike(copy, encoders):
    path = copy.save() / "audiovae.pth"
    for is_archive in (True, False):
        torch.save(copy.tensors, path, _use_new_zipfile_serialization=is_archive)
        loaded = load(copy.directory)["reference"]
        expected = encoders["reference"]
        assert loaded.fingerprint == expected.fingerprint
        again = features_of(loaded, audio(20_000))
        assert np.array_equal(again, features_of(expected, audio(20_000)))


def test_a_safetensors_file_is_read_and_before_any_other(copy, own_checkpoint):
    """As the official package does."""
    path = copy.save({"state_dict": {}}) / "audiovae.safetensors"
    save_file(copy.tensors, path)
    assert fingerprints(copy.directory) == fingerprints(own_checkpoint)
    (copy.directory / "audiovae.pth").unlink()
    assert fingerprints(copy.directory) == fingerprints(own_checkpoint)


def test_only_the_encoder_is_looked_at(copy, own_checkpoint):
    for name in list(copy.tensors):
        if name.startswith(("decoder.", "encoder.fc_logvar.")):
            del copy.tensors[name]
    copy.tensors["discriminator.weight"] = torch.zeros(3)
    copy.config["audio_vae_config"]["out_sample_rate"] = 44_100
    assert fingerprints(copy.save()) == fingerprints(own_checkpoint)


WRONG = {
    r"1 tensors missing: fc_mu\.weight_g": lambda t: t.pop("encoder.fc_mu.weight_g"),
    r"another shape: fc_mu\.weight_g \(1, 1, 1\) instead of \(64, 1, 1\)": (
        lambda t: t.update({"encoder.fc_mu.weight_g": torch.ones(1, 1, 1)})
    ),
    r"missing: fc_mu\.bias": lambda t: t.update({"encoder.fc_mu.bias": "none"}),
}


@pytest.mark.parametrize(("message", "edit"), WRONG.items(), ids=range(len(WRONG)))
def test_a_wrong_set_of_tensors_is_refused_by_name(copy, edit, message):
    edit(copy.tensors)
    with pytest.raises(CheckpointError, match=message) as refused:
        load(copy.save())
    assert "audiovae.pth" in str(refused.value)


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
