"""The talker's ``config.json``, and what the host has to be told beside it.

The host takes nothing from the checkpoint's own ``config.json``, which is empty as the
released one; sizes are its own unless a deploy file says otherwise.
"""

from vllm_tts_cache.families.cosyvoice3.tiny import sizes

Json = dict[str, object]

# Where the talker's config and the tokenizer are.
TALKER_FOLDER = "CosyVoice-BlankEN"


def talker_config(eos_token_id: int) -> Json:
    """Of the language model, which is a Qwen2."""
    size = sizes.TALKER
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads,
        "vocab_size": sizes.TEXT_VOCAB_SIZE,
        "max_position_embeddings": sizes.MAX_POSITIONS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": eos_token_id,
        "eos_token_id": eos_token_id,
    }


def host_overrides() -> Json:
    """``hf_overrides`` of either stage, as the deploy file has them."""
    size = sizes.TALKER
    return {
        "hidden_size": size.hidden,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads,
        "num_hidden_layers": size.num_layers,
        "vocab_size": sizes.NUM_TALKER_IDS,
        "llm": _llm(),
        "flow": _flow(),
        "hift": _hift(),
    }


def _llm() -> Json:
    hidden = sizes.TALKER.hidden
    return {
        "llm_input_size": hidden,
        "llm_output_size": hidden,
        "speech_token_size": sizes.NUM_CODES,
        "eos_token_id": sizes.NUM_CODES + 1,
        "length_normalized_loss": True,
        "lsm_weight": 0,
        "mix_ratio": [5, 15],
        "llm": {"pretrain_path": TALKER_FOLDER},
        "sampling": {"top_p": 0.8, "top_k": 25, "win_size": 10, "tau_r": 0.1},
        "spk_embed_dim": sizes.SPEAKER_SIZE,
    }


def _flow() -> Json:
    return {
        "input_size": sizes.NUM_MELS,
        "output_size": sizes.NUM_MELS,
        "spk_embed_dim": sizes.SPEAKER_SIZE,
        "output_type": "mel",
        "vocab_size": sizes.NUM_CODES,
        "input_frame_rate": 25,
        "only_mask_loss": True,
        "token_mel_ratio": 2,
        "pre_lookahead_len": 3,
        "pre_lookahead_layer": {
            "in_channels": sizes.NUM_MELS,
            "channels": sizes.LOOKAHEAD_CHANNELS,
            "pre_lookahead_len": 3,
        },
        "decoder": {
            "in_channels": 240,
            "n_spks": 1,
            "spk_emb_dim": sizes.NUM_MELS,
            "cfm_params": {
                "sigma_min": 1e-6,
                "solver": "euler",
                "t_scheduler": "cosine",
                "training_cfg_rate": 0.2,
                "inference_cfg_rate": 0.7,
                "reg_loss_type": "l1",
            },
            "estimator": {
                "dim": sizes.DIT_WIDTH,
                "depth": sizes.DIT_DEPTH,
                "heads": sizes.DIT_HEADS,
                "dim_head": sizes.DIT_HEAD_SIZE,
                "ff_mult": 2,
                "mel_dim": sizes.NUM_MELS,
                "mu_dim": sizes.NUM_MELS,
                "spk_dim": sizes.NUM_MELS,
                "out_channels": sizes.NUM_MELS,
                "static_chunk_size": 50,
                "num_decoding_left_chunks": -1,
            },
        },
    }


def _hift() -> Json:
    return {
        "in_channels": sizes.NUM_MELS,
        "base_channels": sizes.VOCODER_CHANNELS,
        "nb_harmonics": 8,
        "sampling_rate": 24_000,
        "nsf_alpha": 0.1,
        "nsf_sigma": 0.003,
        "nsf_voiced_threshold": 10,
        "upsample_rates": [8, 5, 3],
        "upsample_kernel_sizes": [16, 11, 7],
        "istft_params": {"n_fft": 16, "hop_len": 4},
        "resblock_kernel_sizes": [3, 7, 11],
        "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5], [1, 3, 5]],
        "source_resblock_kernel_sizes": [7, 7, 11],
        "source_resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5], [1, 3, 5]],
        "lrelu_slope": 0.1,
        "audio_limit": 0.99,
        "conv_pre_look_right": 4,
        "f0_predictor": {
            "num_class": 1,
            "in_channels": sizes.NUM_MELS,
            "cond_channels": sizes.PITCH_CHANNELS,
        },
    }
