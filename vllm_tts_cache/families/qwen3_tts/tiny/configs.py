"""Options, sizes and JSON files of a checkpoint; names as in the released ones.

Every field is written even where it equals a default, because the defaults of the
official package's transformers and of the host's are not the same.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.testing import tiny_parts as parts
from vllm_tts_cache.testing.tiny_checkpoint import (
    EncoderOptions,
    EncoderSize,
    TransformerSizes,
)

Json = dict[str, Any]

# Fixed by the released models, whatever the size of the networks.
SAMPLE_RATE_HZ = 24_000
SAMPLES_PER_FRAME = 1_920
NUM_CODEBOOKS = 16
CODEBOOK_SIZE = 2_048
TALKER_VOCAB_SIZE = 3_072

_HEADS = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 64}
TALKER = TransformerSizes(hidden=128, intermediate=256, num_layers=2, **_HEADS)
CODE_PREDICTOR = TransformerSizes(hidden=128, intermediate=256, num_layers=1, **_HEADS)
TEXT_HIDDEN = 64


def _codec_transformer(
    hidden: int, intermediate: int, num_layers: int, num_heads: int, head_dim: int
) -> TransformerSizes:
    return TransformerSizes(
        hidden=hidden,
        intermediate=intermediate,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
    )


_TINY = _codec_transformer(64, 128, 2, 2, 32)
_REAL_DECODER = _codec_transformer(1024, 3072, 8, 16, 64)
_REAL_ENCODER = _codec_transformer(512, 2048, 8, 8, 64)

# The 12 Hz codec's causal decoder: its transformer, and other widths.
CODEC_DECODER: dict[EncoderSize, tuple[TransformerSizes, Json]] = {
    "tiny": (_TINY, {"codebook_dim": 64, "latent_dim": 64, "decoder_dim": 64}),
    "real": (
        _REAL_DECODER,
        {"codebook_dim": 512, "latent_dim": 1024, "decoder_dim": 1536},
    ),
}

# ECAPA-TDNN; the last of ``enc_channels`` is the aggregation's.
SPEAKER_ENCODER: dict[EncoderSize, dict[str, Any]] = {
    "tiny": {
        "enc_channels": [32, 32, 32, 32, 96],
        "enc_attention_channels": 16,
        "enc_se_channels": 16,
    },
    "real": {
        "enc_channels": [512, 512, 512, 512, 1536],
        "enc_attention_channels": 128,
        "enc_se_channels": 128,
    },
}

# Mimi's encoder: its transformer, num_filters, codebook_dim and num_quantizers. The
# released one has 32 codebooks, of which the first 16 are used.
CODEC_ENCODER: dict[EncoderSize, tuple[TransformerSizes, int, int, int]] = {
    "tiny": (_TINY, 4, 32, NUM_CODEBOOKS),
    "real": (_REAL_ENCODER, 64, 256, 32),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions(EncoderOptions):
    """Equal options give byte-identical files.

    With ``real`` encoders the 12 Hz codec encoder and the speaker encoder have their
    released sizes, so that encoding a reference costs what it does in production; the
    talker stays tiny.

    Attributes:
        real_decoder: Gives the codec's decoder its released size, so that speaking
            costs what it does in production after the talker.
        eos_logit: Mean logit of the end of speech once the text is over. The other
            codes have a standard deviation of 1, so at temperature 0.9 and top-k 50
            the default ends about 7 % of the frames.

    Raises: ConfigError if a value cannot be used.
    """

    real_decoder: bool = False
    eos_logit: float = 3.6

    def __post_init__(self) -> None:
        if not math.isfinite(self.eos_logit):
            raise ConfigError(f"eos_logit={self.eos_logit}: must be a finite number")


CODEC_EOS_ID = 2150
TTS_PAD, TTS_BOS, TTS_EOS = "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"
ALL_SPECIAL_TOKENS = (
    *(*parts.SPECIAL_TOKENS, TTS_PAD, TTS_BOS, TTS_EOS),
    *("<tts_text_bos_single>", "<|audio_start|>", "<|audio_end|>"),
)
_LANGUAGES = (
    *("chinese", "english", "german", "italian", "portuguese"),
    *("spanish", "japanese", "korean", "french", "russian"),
)


def model_config(ids: Mapping[str, int], encoders: EncoderSize) -> Json:
    """Return ``config.json``; ``ids`` are those of the text's tokens."""
    return {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "model_type": "qwen3_tts",
        "dtype": "bfloat16",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_size": "0b6",
        "tts_model_type": "base",
        "im_start_token_id": ids[parts.IM_START],
        "im_end_token_id": ids[parts.IM_END],
        "tts_pad_token_id": ids[TTS_PAD],
        "tts_bos_token_id": ids[TTS_BOS],
        "tts_eos_token_id": ids[TTS_EOS],
        "talker_config": {
            "model_type": "qwen3_tts_talker",
            **_transformer(TALKER),
            "vocab_size": TALKER_VOCAB_SIZE,
            "text_vocab_size": len(ids),
            "text_hidden_size": TEXT_HIDDEN,
            "num_code_groups": NUM_CODEBOOKS,
            "hidden_act": "silu",
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000,
            "rope_scaling": {
                "interleaved": True,
                "mrope_section": [12, 10, 10],
                "rope_type": "default",
                "type": "default",
            },
            "use_sliding_window": False,
            "tie_word_embeddings": False,
            "position_id_per_seconds": 12.5,
            "codec_pad_id": 2148,
            "codec_bos_id": 2149,
            "codec_eos_token_id": CODEC_EOS_ID,
            "codec_think_id": 2154,
            "codec_nothink_id": 2155,
            "codec_think_bos_id": 2156,
            "codec_think_eos_id": 2157,
            "codec_language_id": {name: 2050 + i for i, name in enumerate(_LANGUAGES)},
            "spk_id": {},
            "spk_is_dialect": {},
            "code_predictor_config": {
                "model_type": "qwen3_tts_talker_code_predictor",
                **_transformer(CODE_PREDICTOR),
                "vocab_size": CODEBOOK_SIZE,
                "num_code_groups": NUM_CODEBOOKS,
                "hidden_act": "silu",
                "max_position_embeddings": 65_536,
                "rms_norm_eps": 1e-6,
                "rope_theta": 1_000_000,
                "rope_scaling": None,
                "layer_types": ["full_attention"] * CODE_PREDICTOR.num_layers,
                "use_sliding_window": False,
                "max_window_layers": CODE_PREDICTOR.num_layers,
                "tie_word_embeddings": False,
            },
        },
        "speaker_encoder_config": {
            "mel_dim": 128,
            # The embedding stands in the prompt beside the talker's own.
            "enc_dim": TALKER.hidden,
            **SPEAKER_ENCODER[encoders],
            "enc_kernel_sizes": [5, 3, 3, 3, 1],
            "enc_dilations": [1, 2, 3, 4, 1],
            "enc_res2net_scale": 8,
            "sample_rate": SAMPLE_RATE_HZ,
        },
    }


# ``generation_config.json``.
GENERATION: Json = {
    "do_sample": True,
    "repetition_penalty": 1.05,
    "temperature": 0.9,
    "top_p": 1.0,
    "top_k": 50,
    "subtalker_dosample": True,
    "subtalker_temperature": 0.9,
    "subtalker_top_p": 1.0,
    "subtalker_top_k": 50,
    "max_new_tokens": 8192,
}

# ``preprocessor_config.json``.
TEXT_PREPROCESSOR: Json = {
    "padding_side": "left",
    "padding_value": 0.0,
    "processor_class": "Qwen3TTSProcessor",
    "return_attention_mask": True,
}


def speech_tokenizer_config(encoders: EncoderSize, decoder: EncoderSize) -> Json:
    """Return ``speech_tokenizer/config.json``."""
    encoder, num_filters, codebook_dim, num_quantizers = CODEC_ENCODER[encoders]
    transformer, widths = CODEC_DECODER[decoder]
    return {
        "architectures": ["Qwen3TTSTokenizerV2Model"],
        "model_type": "qwen3_tts_tokenizer_12hz",
        "dtype": "float32",
        "input_sample_rate": SAMPLE_RATE_HZ,
        "output_sample_rate": SAMPLE_RATE_HZ,
        "decode_upsample_rate": SAMPLES_PER_FRAME,
        "encode_downsample_rate": SAMPLES_PER_FRAME,
        "encoder_valid_num_quantizers": NUM_CODEBOOKS,
        "encoder_config": {
            "model_type": "mimi",
            **_transformer(encoder),
            "_frame_rate": SAMPLE_RATE_HZ / SAMPLES_PER_FRAME,
            "sampling_rate": SAMPLE_RATE_HZ,
            "audio_channels": 1,
            "num_filters": num_filters,
            "num_residual_layers": 1,
            "upsampling_ratios": [8, 6, 5, 4],
            "kernel_size": 7,
            "last_kernel_size": 3,
            "residual_kernel_size": 3,
            "dilation_growth_rate": 2,
            "compress": 2,
            "use_causal_conv": True,
            "use_conv_shortcut": False,
            "use_streaming": False,
            "pad_mode": "constant",
            "trim_right_ratio": 1.0,
            "upsample_groups": encoder.hidden,
            "codebook_size": CODEBOOK_SIZE,
            "codebook_dim": codebook_dim,
            "vector_quantization_hidden_dimension": codebook_dim,
            "num_quantizers": num_quantizers,
            "num_semantic_quantizers": 1,
            "hidden_act": "gelu",
            "max_position_embeddings": 8_000,
            "sliding_window": 250,
            "rope_theta": 10_000.0,
            "layer_scale_initial_scale": 0.01,
            "norm_eps": 1e-5,
        },
        "decoder_config": {
            **_transformer(transformer),
            "codebook_size": CODEBOOK_SIZE,
            **widths,
            "num_quantizers": NUM_CODEBOOKS,
            "num_semantic_quantizers": 1,
            "upsample_rates": [8, 5, 4, 3],
            "upsampling_ratios": [2, 2],
            "hidden_act": "silu",
            "max_position_embeddings": 8_000,
            "sliding_window": 72,
            "rope_theta": 10_000,
            "layer_scale_initial_scale": 0.01,
            "rms_norm_eps": 1e-5,
            "attention_dropout": 0.0,
        },
    }


# ``speech_tokenizer/preprocessor_config.json``.
AUDIO_PREPROCESSOR: Json = {
    "feature_extractor_type": "EncodecFeatureExtractor",
    "feature_size": 1,
    "sampling_rate": SAMPLE_RATE_HZ,
    "chunk_length_s": None,
    "overlap": None,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
}


def _transformer(size: TransformerSizes) -> Json:
    return {**size.config, "head_dim": size.head_dim, "attention_bias": False}
