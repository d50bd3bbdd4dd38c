import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.families.clip import noisy_tone
from vllm_tts_cache.errors import CheckpointError
from vllm_tts_cache.families.qwen3_tts.encoders import load_reference_encoders
from vllm_tts_cache.families.qwen3_tts.family import why_it_clones_nothing

CPU = torch.device("cpu")


def clip(seconds):
    return noisy_tone(round(seconds * 24_000), 24_000)


def same(a, b):
    return a.arrays.keys() == b.arrays.keys() and all(
        np.array_equal(a[name], b[name]) for name in a.arrays
    )


@pytest.fixture
def checkpoint(own_checkpoint, tmp_path):
    return shutil.copytree(own_checkpoint, tmp_path / "checkpoint")


def edit_weights(path, edit):
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def fingerprints(directory):
    return {
        k: e.fingerprint for k, e in load_reference_encoders(directory, CPU).items()
    }


def test_the_host_attention_window_is_off(own_checkpoint, encoders):
    """The same 28 s would get other codes with it, so this checkpoint can tell."""
    windowed = load_reference_encoders(own_checkpoint, CPU)["codec"]
    windowed.network.encoder_transformer.config.sliding_window = 250  # pyright: ignore
    short, long = clip(1.0), clip(28.0)
    assert same(windowed.encode(short), encoders["codec"].encode(short))
    assert not same(windowed.encode(long), encoders["codec"].encode(long))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("speaker_encoder.fc.bias"), "1 tensors missing: fc.bias"),
        (
            lambda t: t.update(
                {"speaker_encoder.fc.bias": torch.zeros(128, dtype=torch.int8)}
            ),
            "1 tensors quantised: fc.bias int8",
        ),
        (
            lambda t: t.update({"speaker_encoder.fc.bias": torch.zeros(7)}),
            r"1 tensors of another shape: fc.bias \(7,\) instead of \(128,\)",
        ),
    ],
    ids=["missing", "quantised", "misshaped"],
)
def test_a_wrong_set_of_tensors_is_refused_by_name(checkpoint, edit, message):
    edit_weights(checkpoint / "model.safetensors", edit)
    with pytest.raises(CheckpointError, match=message):
        load_reference_encoders(checkpoint, CPU)


def test_a_sharded_checkpoint_loads_as_the_same_encoders(checkpoint):
    before = fingerprints(checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, kept in shards.items():
        save_file({name: tensors[name] for name in kept}, checkpoint / file)
    index = {name: file for file, kept in shards.items() for name in kept}
    (checkpoint / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": index})
    )
    assert fingerprints(checkpoint) == before


def test_a_kind_is_read_as_the_host_reads_it(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    text = json.dumps({**config, "tts_model_type": "Base"})
    (checkpoint / "config.json").write_text(text)
    assert why_it_clones_nothing(checkpoint) is None
    assert fingerprints(checkpoint).keys() == {"speaker", "codec"}
