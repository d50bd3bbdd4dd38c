"""What the encodings of Qwen3-TTS depend on."""

from inspect import signature

from transformers.models.mimi.configuration_mimi import MimiConfig
from vllm_omni.model_executor.models.qwen3_tts.configuration_qwen3_tts import (
    Qwen3TTSSpeakerEncoderConfig,
)

from tests.families.cases import Identity, Section
from vllm_tts_cache.families.networks.qwen3_codec import encoder as codec_encoder
from vllm_tts_cache.families.qwen3_tts import encoders

SPEECH_TOKENIZER = "speech_tokenizer/config.json"

IDENTITIES = {
    "speaker": Identity(
        network="qwen3 ecapa speaker encoder",
        config=(
            Section(
                file="config.json",
                path=("speaker_encoder_config",),
                values={
                    name: parameter.default
                    for name, parameter in signature(
                        Qwen3TTSSpeakerEncoderConfig
                    ).parameters.items()
                    if parameter.default is not parameter.empty
                },
            ),
        ),
        constants={
            encoders: (
                "REVISION",
                "RESAMPLER",
                "_NUM_FFT",
                "_NUM_MELS",
                "_HOP_SAMPLES",
                "_MAX_HZ",
            )
        },
        read=frozenset({"enc_dilations"}),
    ),
    "codec": Identity(
        network="qwen3 12 hz codec",
        config=(
            Section(
                file=SPEECH_TOKENIZER,
                path=("encoder_config",),
                values={**MimiConfig().to_dict(), "frame_rate": 12.5},
            ),
            Section(
                file=SPEECH_TOKENIZER,
                values={
                    "input_sample_rate": 24_000,
                    "encode_downsample_rate": 1_920,
                    "encoder_valid_num_quantizers": 16,
                },
            ),
        ),
        constants={codec_encoder: ("REVISION", "RESAMPLER")},
        read=frozenset(
            {
                "hidden_act",
                "norm_eps",
                "rope_parameters",
                "input_sample_rate",
                "encode_downsample_rate",
                "encoder_valid_num_quantizers",
            }
        ),
    ),
}
