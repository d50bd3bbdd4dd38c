"""The JSON files of a checkpoint; the field names are those of the released ones.

Every field is written even where it equals a default, because the defaults of the
official package's transformers and of the host's are not the same.
"""

from collections.abc import Mapping
from typing import Any

from vllm_tts_cache.families.qwen3_tts.tiny import sizes
from vllm_tts_cache.testing import tiny_parts as parts
from vllm_tts_cache.testing.tiny_checkpoint import EncoderSize

Json = dict[str, Any]

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
            **_transformer(sizes.TALKER),
            "vocab_size": sizes.TALKER_VOCAB_SIZE,
            "text_vocab_size": len(ids),
            "text_hidden_size": sizes.TEXT_HIDDEN,
            "num_code_groups": sizes.NUM_CODEBOOKS,
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
                **_transformer(sizes.CODE_PREDICTOR),
                "vocab_size": sizes.CODEBOOK_SIZE,
                "num_code_groups": sizes.NUM_CODEBOOKS,
                "hidden_act": "silu",
                "max_position_embeddings": 65_536,
                "rms_norm_eps": 1e-6,
                "rope_theta": 1_000_000,
                "rope_scaling": None,
                "layer_types": ["full_attention"] * sizes.CODE_PREDICTOR.num_layers,
                "use_sliding_window": False,
                "max_window_layers": sizes.CODE_PREDICTOR.num_layers,
                "tie_word_embeddings": False,
            },
        },
        "speaker_encoder_config": {
            "mel_dim": sizes.NUM_MEL_BINS,
            # The embedding stands in the prompt beside the talker's own.
            "enc_dim": sizes.TALKER.hidden,
            **sizes.SPEAKER_ENCODER[encoders],
            "enc_kernel_sizes": [5, 3, 3, 3, 1],
            "enc_dilations": [1, 2, 3, 4, 1],
            "enc_res2net_scale": 8,
            "sample_rate": sizes.SAMPLE_RATE_HZ,
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


def speech_tokenizer_config(
    encoders: EncoderSize, decoder: sizes.CodecDecoderSizes
) -> Json:
    """Return ``speech_tokenizer/config.json``."""
    encoder = sizes.CODEC_ENCODER[encoders]
    return {
        "architectures": ["Qwen3TTSTokenizerV2Model"],
        "model_type": "qwen3_tts_tokenizer_12hz",
        "dtype": "float32",
        "input_sample_rate": sizes.SAMPLE_RATE_HZ,
        "output_sample_rate": sizes.SAMPLE_RATE_HZ,
        "decode_upsample_rate": sizes.SAMPLES_PER_FRAME,
        "encode_downsample_rate": sizes.SAMPLES_PER_FRAME,
        "encoder_valid_num_quantizers": sizes.NUM_CODEBOOKS,
        "encoder_config": {
            "model_type": "mimi",
            **_transformer(encoder.transformer),
            "_frame_rate": sizes.SAMPLE_RATE_HZ / sizes.SAMPLES_PER_FRAME,
            "sampling_rate": sizes.SAMPLE_RATE_HZ,
            "audio_channels": 1,
            "num_filters": encoder.num_filters,
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
            "upsample_groups": encoder.transformer.hidden,
            "codebook_size": sizes.CODEBOOK_SIZE,
            "codebook_dim": encoder.codebook_dim,
            "vector_quantization_hidden_dimension": encoder.codebook_dim,
            "num_quantizers": encoder.num_quantizers,
            "num_semantic_quantizers": 1,
            "hidden_act": "gelu",
            "max_position_embeddings": 8_000,
            "sliding_window": 250,
            "rope_theta": 10_000.0,
            "layer_scale_initial_scale": 0.01,
            "norm_eps": 1e-5,
        },
        "decoder_config": {
            **_transformer(decoder.transformer),
            "codebook_size": sizes.CODEBOOK_SIZE,
            "codebook_dim": decoder.codebook_dim,
            "latent_dim": decoder.latent_dim,
            "decoder_dim": decoder.decoder_dim,
            "num_quantizers": sizes.NUM_CODEBOOKS,
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
    "sampling_rate": sizes.SAMPLE_RATE_HZ,
    "chunk_length_s": None,
    "overlap": None,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
}


def _transformer(size: sizes.TransformerSizes) -> Json:
    return {**size.config, "head_dim": size.head_dim, "attention_bias": False}
