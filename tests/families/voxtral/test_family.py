"""When a Voxtral checkpoint cannot clone, told as the host will find out."""

import json
import shutil
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.families.voxtral.tiny_checkpoint import (
    PARAMS,
    PRESETS,
    host_audio_tokenizer,
    host_config,
)
from vllm_tts_cache.errors import CheckpointError
from vllm_tts_cache.families.voxtral.family import (
    FAMILY,
    preset_voices,
    why_it_clones_nothing,
)
from vllm_tts_cache.speaker.family import families, family_of_checkpoint

REFUSAL = (
    "This Voxtral checkpoint has no reference encoder, so it cannot clone: it has "
    "the preset voices casual_male, fr_male, neutral_female. Name one in `voice`."
)
DECODER = "audio_tokenizer.decoder_blocks.0.conv.weight"
ENCODERS = (
    "audio_tokenizer.input_proj.conv.parametrizations.weight.original0",
    "audio_tokenizer.encoder_blocks.0.layers.0.attention.wq.weight",
)


@pytest.fixture
def directory(tmp_path):
    """A checkpoint of which only ``params.json`` is there."""
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    return tmp_path


def save_names(path, *names):
    save_file({name: np.zeros(1, np.float32) for name in names}, path)


def test_the_released_layout_is_recognised_and_says_why_it_clones_nothing(
    voxtral_checkpoint,
):
    assert FAMILY in families()
    assert family_of_checkpoint(voxtral_checkpoint) is FAMILY
    assert FAMILY.clones(voxtral_checkpoint) == REFUSAL


def test_a_checkpoint_with_the_encoder_gives_no_reason_and_has_no_modes(
    voxtral_with_encoder,
):
    assert family_of_checkpoint(voxtral_with_encoder) is FAMILY
    assert FAMILY.clones(voxtral_with_encoder) is None
    assert FAMILY.modes == ()


@pytest.mark.parametrize("encoder", ENCODERS)
def test_any_weight_of_the_encoder_in_any_file_counts(directory, encoder):
    save_names(directory / "consolidated-00001-of-00002.safetensors", DECODER)
    assert why_it_clones_nothing(directory) == REFUSAL
    save_names(directory / "consolidated-00002-of-00002.safetensors", encoder)
    assert why_it_clones_nothing(directory) is None


def test_files_that_the_host_does_not_load_do_not_count(directory):
    save_names(directory / "consolidated.safetensors", DECODER)
    save_names(directory / "model.safetensors", *ENCODERS)
    assert why_it_clones_nothing(directory) == REFUSAL
    (directory / "consolidated.safetensors").unlink()
    assert why_it_clones_nothing(directory) is None


def test_without_weights_at_hand_the_host_decides(directory):
    assert why_it_clones_nothing(directory) is None


def test_the_names_are_the_ones_that_switch_the_hosts_encoder_on(
    voxtral_with_encoder, tmp_path
):
    from safetensors import safe_open

    shutil.copy(voxtral_with_encoder / "params.json", tmp_path)
    network = host_audio_tokenizer()
    with safe_open(
        voxtral_with_encoder / "consolidated.safetensors", framework="pt"
    ) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    seen = set()
    for name, tensor in tensors.items():
        if not name.startswith("audio_tokenizer."):
            continue
        network._encoder_loaded = False
        network.load_weight((name.removeprefix("audio_tokenizer."), tensor))
        save_names(tmp_path / "consolidated.safetensors", name)
        assert (why_it_clones_nothing(tmp_path) is None) == network.encoder_loaded
        seen.add(network.encoder_loaded)
    assert seen == {True, False}


def test_only_headers_are_read(directory):
    path = directory / "consolidated.safetensors"
    header = json.dumps(
        {DECODER: {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4 << 40]}}
    ).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (4 << 40))  # four TiB of nothing
    assert why_it_clones_nothing(directory) == REFUSAL


def test_presets_are_those_that_the_host_takes(voxtral_checkpoint, directory):
    from vllm_omni.entrypoints.openai.tts_adapters.capabilities import (
        load_supported_speakers,
    )

    spelled = {"Neutral_Female": 0, "casual_male": 1}
    params = json.loads((directory / "params.json").read_text())
    params["multimodal"]["audio_tokenizer_args"]["voice"] = spelled
    (directory / "params.json").write_text(json.dumps(params))
    for model_dir in (voxtral_checkpoint, directory):
        known = load_supported_speakers(None, host_config(model_dir).audio_config)
        assert preset_voices(model_dir) == sorted(known)
    assert preset_voices(voxtral_checkpoint) == sorted(PRESETS)


def test_without_presets_the_reason_names_none(directory):
    params = json.loads((directory / "params.json").read_text())
    del params["multimodal"]["audio_tokenizer_args"]["voice"]
    (directory / "params.json").write_text(json.dumps(params))
    save_names(directory / "consolidated.safetensors", DECODER)
    reason = why_it_clones_nothing(directory)
    assert reason is not None
    assert "cannot clone" in reason and "no preset voices" in reason


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"model_type": "voxtral_tts"}, True),
        ({"architectures": ["VoxtralTTSForConditionalGeneration"]}, True),
        ({"architectures": ["VoxtralForConditionalGeneration"]}, False),
        ({"model_type": "transformer"}, False),
        ({}, False),
    ],
)
def test_what_is_recognised_is_what_the_host_recognises(tmp_path, params, expected):
    from vllm_omni.transformers_utils.parsers.voxtral_tts import _is_voxtral_tts_params

    (tmp_path / "params.json").write_text(json.dumps(params))
    assert FAMILY.recognises(tmp_path) == _is_voxtral_tts_params(params) == expected


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"architectures": 3}'])
def test_other_directories_are_not_recognised(tmp_path, content):
    assert not FAMILY.recognises(tmp_path)
    (tmp_path / "params.json").write_bytes(content)
    assert not FAMILY.recognises(tmp_path)


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs", b"\0" * 100])
def test_a_file_that_is_no_checkpoint_is_named(directory, content):
    path = directory / "consolidated.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=path.name):
        why_it_clones_nothing(directory)
    path.unlink()
    path.symlink_to(directory / "not downloaded")
    with pytest.raises(CheckpointError, match="No such file"):
        why_it_clones_nothing(directory)


def test_describing_it_loads_neither_torch_nor_the_host(directory):
    import subprocess

    save_names(directory / "consolidated.safetensors", DECODER)
    code = (
        "import sys; from pathlib import Path;"
        "from vllm_tts_cache.families.voxtral.family import FAMILY;"
        f"assert FAMILY.clones(Path({str(directory)!r}));"
        "assert not {'torch', 'vllm', 'fastapi'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
