"""The Higgs Audio tokenizer that several families share: transformers' codes."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_tts_cache.errors import CheckpointError
from vllm_tts_cache.families.networks.higgs_tokenizer.encoder import load_higgs_encoder
from vllm_tts_cache.families.networks.higgs_tokenizer.tiny import write_tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    written = tmp_path_factory.mktemp("higgs") / "audio_tokenizer"
    write_tokenizer(written, encoders="tiny", seed=0)
    return written


@pytest.fixture
def copied(directory, tmp_path):
    return shutil.copytree(directory, tmp_path / "audio_tokenizer")


def load(directory):
    cpu = torch.device("cpu")
    return load_higgs_encoder(directory, cpu, resampler="none", preparation={})


def test_the_older_names_of_a_normed_weight_are_read_as_well(copied, directory):
    path = copied / "model.safetensors"
    names = {"original0": "weight_g", "original1": "weight_v"}
    renamed = {}
    for name, tensor in load_file(path).items():
        for new, old in names.items():
            name = name.replace(f"parametrizations.weight.{new}", old)  # noqa: PLW2901
        renamed[name] = tensor
    assert sum("weight_g" in name for name in renamed) == 1
    save_file(renamed, path)
    assert load(copied).fingerprint == load(directory).fingerprint


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
    path = copied / "config.json"
    config = json.loads(path.read_text())
    (config[section] if section else config).update(values)
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=named):
        load(copied)
