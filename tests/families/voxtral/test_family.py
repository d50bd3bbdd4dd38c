"""When a Voxtral checkpoint cannot clone, told as the host will find out."""

import json

import pytest

from tests.families.voxtral.tiny_checkpoint import (
    DECODER,
    ENCODERS,
    PARAMS,
    PRESETS,
    host_audio_tokenizer,
    host_config,
    save_names,
)
from vllm_tts_cache.errors import CheckpointError
from vllm_tts_cache.families.voxtral.family import (
    FAMILY,
    preset_voices,
    why_it_clones_nothing,
)

REFUSAL = (
    "This Voxtral checkpoint has no reference encoder, so it cannot clone: it has "
    "the preset voices casual_male, fr_male, neutral_female. Name one in `voice`."
)


@pytest.fixture
def directory(tmp_path):
    """A checkpoint of which only ``params.json`` is there."""
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    return tmp_path


def test_any_weight_of_the_encoder_in_any_file_that_the_host_loads_counts(directory):
    assert why_it_clones_nothing(directory) is None, "without weights the host decides"
    save_names(directory / "model.safetensors", *ENCODERS)
    assert why_it_clones_nothing(directory) is None
    first, second = (directory / f"consolidated-{n}.safetensors" for n in (1, 2))
    save_names(first, DECODER)
    assert why_it_clones_nothing(directory) == REFUSAL
    for encoder in ENCODERS:
        save_names(second, encoder)
        assert why_it_clones_nothing(directory) is None


def test_the_names_are_the_ones_that_switch_the_hosts_encoder_on(directory):
    network, seen = host_audio_tokenizer(), set()
    for name, tensor in network.state_dict().items():
        if name.startswith("audio_token_embedding."):  # released as the talker's
            continue
        network._encoder_loaded = False
        network.load_weight((name, tensor))
        save_names(directory / "consolidated.safetensors", f"audio_tokenizer.{name}")
        assert (why_it_clones_nothing(directory) is None) == network.encoder_loaded
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


@pytest.mark.parametrize("voice", [PRESETS, {"Neutral_Female": 0, "casual_male": 1}])
def test_presets_are_those_that_the_host_takes(directory, voice):
    from vllm_omni.entrypoints.openai.tts_adapters.capabilities import (
        load_supported_speakers,
    )

    write_presets(directory, voice)
    known = load_supported_speakers(None, host_config(directory).audio_config)
    assert preset_voices(directory) == sorted(known)


def write_presets(directory, voice):
    params = json.loads((directory / "params.json").read_text())
    params["multimodal"]["audio_tokenizer_args"]["voice"] = voice
    (directory / "params.json").write_text(json.dumps(params))


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


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs", b"\0" * 100])
def test_a_file_that_is_no_checkpoint_is_named(directory, content):
    path = directory / "consolidated.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=path.name):
        why_it_clones_nothing(directory)
