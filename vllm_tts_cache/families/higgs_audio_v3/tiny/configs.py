"""The JSON files of a checkpoint, and its tokenizer; field names as released."""

from pathlib import Path

from vllm_tts_cache.families.higgs_audio_v3.encoders import SIZES
from vllm_tts_cache.families.higgs_audio_v3.family import MODEL_TYPE
from vllm_tts_cache.families.higgs_audio_v3.tiny import sizes
from vllm_tts_cache.families.networks.higgs_tokenizer.tiny import tokenizer_config
from vllm_tts_cache.testing.tiny_checkpoint import EncoderSize
from vllm_tts_cache.testing.tiny_parts import save_byte_tokenizer

END_OF_TEXT = "<|endoftext|>"
# The first and the last are where the released tokenizer has them: the host's pipeline
# stops at their ids.
CONTROL_IDS: dict[str, int] = {
    END_OF_TEXT: 151_643,
    "<|im_start|>": 151_644,
    "<|im_end|>": 151_645,
    "<|tts|>": 151_666,
    "<|ref_text|>": 151_667,
    "<|ref_audio|>": 151_668,
    "<|text|>": 151_669,
    "<|audio|>": 151_670,
    "<|audio_end|>": 151_671,
}

Json = dict[str, object]


def model_config(encoders: EncoderSize) -> Json:
    """``config.json``; a tokenizer of other than released sizes has them in it."""
    config: Json = {
        "architectures": ["HiggsMultimodalQwen3ForConditionalGeneration"],
        "model_type": MODEL_TYPE,
        "dtype": "bfloat16",
        "audio_token_id": -100,
        "eos_token_id": CONTROL_IDS[END_OF_TEXT],
        "audio_encoder_config": {
            "model_type": "higgs_audio_encoder",
            "encoder_type": "discrete",
            "num_codebooks": sizes.NUM_CODEBOOKS,
            "vocab_size": sizes.CODEBOOK_SIZE,
            "out_dim": sizes.TALKER.hidden,
            "tie_word_embeddings": True,
            "use_delay_pattern": True,
        },
        "text_config": _text_config(),
    }
    if encoders != "real":
        config[SIZES] = tokenizer_config(encoders, sizes.DECODER_DIM)
    return config


def _text_config() -> Json:
    size = sizes.TALKER
    return {
        "model_type": "qwen3",
        "vocab_size": sizes.VOCAB_SIZE,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "eos_token_id": CONTROL_IDS[END_OF_TEXT],
    }


def save_text_tokenizer(out: Path) -> None:
    """Write the files of the checkpoint's own tokenizer."""
    save_byte_tokenizer(out, CONTROL_IDS, end=END_OF_TEXT, pad=END_OF_TEXT)
