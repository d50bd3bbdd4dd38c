"""The test checkpoint fits the host's classes, with encoders of both sizes."""

import json
from typing import Any

import pytest
import torch
from safetensors import safe_open
from vllm_omni.model_executor.models.qwen3_tts.configuration_qwen3_tts import (
    Qwen3TTSConfig,
    Qwen3TTSSpeakerEncoderConfig,
)
from vllm_omni.model_executor.models.qwen3_tts.tokenizer_12hz.configuration_qwen3_tts_tokenizer_v2 import (  # noqa: E501
    Qwen3TTSTokenizerV2Config,
)

from vllm_tts_cache.families.qwen3_tts.family import FAMILY
from vllm_tts_cache.families.qwen3_tts.tiny import configs
from vllm_tts_cache.families.qwen3_tts.tiny.sizes import CheckpointOptions
from vllm_tts_cache.testing.tiny_checkpoint import TinyCheckpoint


@pytest.fixture(scope="module", params=["tiny", "real"])
def checkpoint(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("module") / request.param
    return TinyCheckpoint.of(FAMILY, encoders=request.param).write(out)


def shapes_in_file(path, prefix):
    with safe_open(path, "pt") as file:
        return {
            name.removeprefix(prefix): file.get_slice(name).get_shape()
            for name in file.keys()  # noqa: SIM118
            if name.startswith(prefix)
        }


def shapes_of(module):
    return {name: list(tensor.shape) for name, tensor in module.state_dict().items()}


def speaker_encoder_of(config):
    from vllm_omni.model_executor.models.qwen3_tts.qwen3_tts_talker import (
        Qwen3TTSSpeakerEncoder,
    )

    return Qwen3TTSSpeakerEncoder(config.speaker_encoder_config)


def codec_of(checkpoint) -> tuple[Any, Any]:
    """Encoder and decoder; the host's annotations say less than they return."""
    from vllm_omni.model_executor.models.qwen3_tts.tokenizer_12hz import (
        modeling_qwen3_tts_tokenizer_v2 as modeling,
    )

    config = Qwen3TTSTokenizerV2Config.from_pretrained(checkpoint / "speech_tokenizer")
    encoder = modeling.Qwen3TTSTokenizerV2Encoder._from_config(config.encoder_config)
    decoder = modeling.Qwen3TTSTokenizerV2Decoder._from_config(config.decoder_config)
    return encoder.eval(), decoder.eval()


def test_every_tensor_has_the_name_and_shape_that_the_host_expects(checkpoint):
    with torch.device("meta"):
        speaker_encoder = speaker_encoder_of(Qwen3TTSConfig.from_pretrained(checkpoint))
        encoder, decoder = codec_of(checkpoint)
    model = checkpoint / "model.safetensors"
    speech_tokenizer = checkpoint / "speech_tokenizer" / "model.safetensors"
    assert shapes_in_file(model, "speaker_encoder.") == shapes_of(speaker_encoder)
    assert shapes_in_file(speech_tokenizer, "encoder.") == shapes_of(encoder)
    assert shapes_in_file(speech_tokenizer, "decoder.") == shapes_of(decoder)


def test_real_encoders_are_what_the_host_and_transformers_take_for_granted(tmp_path):
    from transformers import MimiConfig

    checkpoint = TinyCheckpoint.of(FAMILY, encoders="real").write(tmp_path / "real")
    speaker = Qwen3TTSConfig.from_pretrained(checkpoint).speaker_encoder_config
    for name, value in vars(Qwen3TTSSpeakerEncoderConfig()).items():
        # The embedding is as wide as the talker, which stays tiny.
        assert getattr(speaker, name) == value or name == "enc_dim", name
    written = json.loads((checkpoint / "speech_tokenizer" / "config.json").read_text())
    defaults = MimiConfig()
    for name, value in written["encoder_config"].items():
        if name not in ("_frame_rate", "rope_theta"):
            assert getattr(defaults, name) == value, name


def test_a_real_decoder_is_what_the_host_takes_for_granted():
    options = CheckpointOptions(real_decoder=True)
    written = configs.speech_tokenizer_config("tiny", options.decoder)
    given = written["decoder_config"]
    defaults = Qwen3TTSTokenizerV2Config().decoder_config
    assert isinstance(given, dict)
    # What the host has no value for, as the released file has it.
    released = {"codebook_dim": 512, "num_semantic_quantizers": 1, "head_dim": 64}
    for name, value in given.items():
        default = getattr(defaults, name, None)
        default = list(default) if isinstance(default, tuple) else default
        assert value == released.get(name, default), name
