"""``config.json``; the field names are those of the released one."""

from vllm_tts_cache.families.voxcpm2.tiny import sizes
from vllm_tts_cache.testing.tiny_checkpoint import EncoderSize, TransformerSizes

Json = dict[str, object]


def model_config(vocab_size: int, encoders: EncoderSize) -> Json:
    """Everything about the model, which knows neither Transformers nor vLLM."""
    return {
        "architecture": "voxcpm2",
        "lm_config": _lm_config(vocab_size),
        "patch_size": sizes.PATCH_SIZE,
        "feat_dim": sizes.LATENT_DIM,
        "residual_lm_num_layers": sizes.RESIDUAL_LM.num_layers,
        "residual_lm_no_rope": True,
        "scalar_quantization_latent_dim": sizes.QUANTIZER_DIM,
        "scalar_quantization_scale": sizes.QUANTIZER_SCALE,
        "encoder_config": _side_model(sizes.FEATURE_ENCODER),
        "dit_config": {
            **_side_model(sizes.DIT),
            "dit_mean_mode": False,
            "cfm_config": {
                "sigma_min": 1e-6,
                "solver": "euler",
                "t_scheduler": "log-norm",
                "inference_cfg_rate": 2.0,
            },
        },
        "audio_vae_config": _audio_vae_config(encoders),
        "max_length": sizes.MAX_POSITIONS,
        "device": "cuda",  # the package takes the CPU where there is no GPU
        "dtype": "bfloat16",
    }


def _lm_config(vocab_size: int) -> Json:
    size = sizes.LM
    factors = [1.0] * (size.head_dim // 2)
    return {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "vocab_size": vocab_size,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads,
        "kv_channels": size.head_dim,
        "max_position_embeddings": sizes.MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "rope_scaling": {
            "type": "longrope",
            "long_factor": factors,
            "short_factor": factors,
            "original_max_position_embeddings": sizes.MAX_POSITIONS,
        },
        "use_mup": False,
        "scale_emb": 12,
        "dim_model_base": 256,
        "scale_depth": 1.4,
    }


def _side_model(size: TransformerSizes) -> Json:
    return {
        "hidden_dim": size.hidden,
        "ffn_dim": size.intermediate,
        "num_heads": size.num_heads,
        "num_layers": size.num_layers,
        "kv_channels": size.head_dim,
    }


def _audio_vae_config(encoders: EncoderSize) -> Json:
    return {
        "encoder_dim": sizes.ENCODER_DIM[encoders],
        "encoder_rates": list(sizes.ENCODER_RATES),
        "latent_dim": sizes.LATENT_DIM,
        "decoder_dim": sizes.DECODER_DIM,
        "decoder_rates": list(sizes.DECODER_RATES),
        "depthwise": True,
        "sample_rate": 16_000,
        "out_sample_rate": 48_000,
        "use_noise_block": False,
        "sr_bin_boundaries": list(sizes.RATE_BOUNDARIES_HZ),
        "cond_type": "scale_bias",
        "cond_dim": 128,
        "cond_out_layer": False,
    }
