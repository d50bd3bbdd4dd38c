"""The test checkpoint fits the host's classes, and does what it is there for."""

import json
from typing import Any

import pytest
import soundfile
import soxr
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from vllm_omni.model_executor.models.qwen3_tts.configuration_qwen3_tts import (
    Qwen3TTSConfig,
    Qwen3TTSSpeakerEncoderConfig,
)
from vllm_omni.model_executor.models.qwen3_tts.tokenizer_12hz.configuration_qwen3_tts_tokenizer_v2 import (  # noqa: E501
    Qwen3TTSTokenizerV2Config,
)

from tests.families.qwen3_tts.written import write_qwen3_tts_checkpoint
from vllm_tts_cache.families.qwen3_tts.tiny import configs, sizes
from vllm_tts_cache.families.qwen3_tts.tiny.sizes import CheckpointOptions
from vllm_tts_cache.testing.clips import OTHER_SPEECH, SPEECH


@pytest.fixture(scope="module", params=["tiny", "real"])
def checkpoint(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("module") / request.param
    return write_qwen3_tts_checkpoint(out, CheckpointOptions(encoders=request.param))


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


def test_the_configs_read_in_the_hosts_classes_as_they_were_written(checkpoint):
    config = Qwen3TTSConfig.from_pretrained(checkpoint)
    codec = Qwen3TTSTokenizerV2Config.from_pretrained(checkpoint / "speech_tokenizer")
    assert config.codec_frame_rate_hz == 12.5
    assert config.talker_config.codec_eos_token_id == 2150
    assert config.speaker_encoder_config.enc_dim == config.talker_config.hidden_size
    assert codec.encoder_config.frame_rate == 12.5
    assert codec.encode_downsample_rate == sizes.SAMPLES_PER_FRAME


def test_real_encoders_are_what_the_host_and_transformers_take_for_granted(tmp_path):
    from transformers import MimiConfig

    options = CheckpointOptions(encoders="real")
    checkpoint = write_qwen3_tts_checkpoint(tmp_path / "real", options)
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


class Codec:
    """The host's codec with the checkpoint's weights, in float32."""

    def __init__(self, checkpoint):
        self.encoder, self.decoder = codec_of(checkpoint)
        path = checkpoint / "speech_tokenizer" / "model.safetensors"
        for prefix, module in (("encoder.", self.encoder), ("decoder.", self.decoder)):
            module.load_state_dict(
                {
                    name.removeprefix(prefix): tensor
                    for name, tensor in load_file(path).items()
                    if name.startswith(prefix)
                }
            )

    @torch.no_grad()
    def codes(self, samples):
        dtype = next(self.encoder.parameters()).dtype
        encoded = self.encoder.encode(samples[None, None].to(dtype), return_dict=True)
        return encoded.audio_codes[0, : sizes.NUM_CODEBOOKS]


def samples_of(clip):
    samples, sample_rate_hz = soundfile.read(clip.path, dtype="float32")
    return torch.from_numpy(soxr.resample(samples, sample_rate_hz, 24_000))


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    return Codec(write_qwen3_tts_checkpoint(tmp_path_factory.mktemp("s") / "tiny"))


def test_two_clips_share_hardly_a_code_and_each_uses_many(codec):
    one, other = codec.codes(samples_of(SPEECH)), codec.codes(samples_of(OTHER_SPEECH))
    num_frames = min(one.shape[1], other.shape[1])
    assert (one[:, :num_frames] == other[:, :num_frames]).float().mean() < 0.05
    assert all(len(book.unique()) > 0.5 * one.shape[1] for book in one)


def test_the_attention_window_is_seen_in_the_codes(codec):
    long = torch.cat([samples_of(SPEECH), samples_of(OTHER_SPEECH)] * 2)
    windowed = codec.codes(long)
    config = codec.encoder.encoder_transformer.config
    window, config.sliding_window = config.sliding_window, 8000
    try:
        causal = codec.codes(long)
    finally:
        config.sliding_window = window
    num_frames_in_window = window // 2
    inside = slice(None, num_frames_in_window - 10)
    assert torch.equal(windowed[:, inside], causal[:, inside])
    assert (windowed != causal).float().mean() > 0.1


def test_bfloat16_is_seen_in_the_codes(codec, tmp_path):
    samples = samples_of(SPEECH)
    exact = codec.codes(samples)
    rounded = Codec(write_qwen3_tts_checkpoint(tmp_path / "tiny"))
    rounded.encoder.to(torch.bfloat16)
    assert (rounded.codes(samples) != exact).float().mean() > 0.05


def test_what_the_decoder_speaks_is_audible_and_not_clipped(codec):
    with torch.no_grad():
        samples = codec.decoder(codec.codes(samples_of(SPEECH))[None])
    assert 0.05 < samples.std() < 0.3
    assert samples.abs().max() < 1
