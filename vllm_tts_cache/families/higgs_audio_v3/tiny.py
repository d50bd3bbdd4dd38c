"""Write a tiny Higgs Audio v3 checkpoint with random weights. Not a model."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from vllm_tts_cache.families.higgs_audio_v3.encoders import CODEC_PREFIX, SIZES
from vllm_tts_cache.families.higgs_audio_v3.family import MODEL_TYPE
from vllm_tts_cache.families.networks.higgs_tokenizer.tiny import (
    add_tokenizer,
    tokenizer_config,
)
from vllm_tts_cache.testing import tiny_checkpoint as tiny
from vllm_tts_cache.testing import tiny_parts as parts
from vllm_tts_cache.testing.tiny_parts import WeightBuilder

# As released. The host's pipeline stops at some of the ids, so all of them stay.
_VOCAB_SIZE = 151_936
_NUM_CODEBOOKS = 8
# With the two codes that begin and end a codebook's frames.
_CODEBOOK_SIZE = 1_026
# The host knows the released decoder only.
_DECODER_DIM = 1_024

_TALKER = tiny.TransformerSizes(
    hidden=128, intermediate=384, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32
)

# As released: the host's pipeline stops at the ids of both ends.
_CONTROL_IDS: dict[str, int] = {
    parts.END_OF_TEXT: 151_643,
    "<|im_start|>": 151_644,
    "<|im_end|>": 151_645,
    "<|tts|>": 151_667,
    "<|audio|>": 151_670,
    "<|audio_end|>": 151_671,
    "<|text|>": 151_672,
    "<|ref_audio|>": 151_679,
    "<|ref_text|>": 151_680,
}

_PROJECTION_STD = 0.08
_EMBEDDING_STD = 0.3
_ATTENTION_SHARPNESS = 2.0

# The decoder is bfloat16: float32 would be most of the file, and no test compares it.
_DECODER = "acoustic_decoder."


def write(directory: Path, options: tiny.EncoderOptions, report: tiny.Report) -> None:
    """Fill an empty directory; called as the family's ``tiny_part``.

    With ``real`` encoders the tokenizer's encode side has its released size.
    """
    report("text tokenizer")
    end = parts.END_OF_TEXT
    parts.save_byte_tokenizer(directory, _CONTROL_IDS, end=end, pad=end)
    report("talker")
    weights = WeightBuilder(options.seed)
    _add_talker(weights)
    tensors = {name: t.to(torch.bfloat16) for name, t in weights.tensors.items()}
    report("audio tokenizer")
    weights = WeightBuilder(options.seed)
    add_tokenizer(weights, tokenizer_config(options.encoders, _DECODER_DIM))
    for name, tensor in weights.tensors.items():
        dtype = torch.bfloat16 if name.startswith(_DECODER) else torch.float32
        tensors[CODEC_PREFIX + name] = tensor.to(dtype)
    ordered = {name: tensors[name].contiguous() for name in sorted(tensors)}
    save_file(ordered, directory / "model.safetensors", metadata={"format": "pt"})
    parts.save_json(directory / "config.json", _model_config(options.encoders))


def _add_talker(weights: WeightBuilder) -> None:
    """Add all but the tokenizer, under the names that the released file has."""
    tied, hidden = weights.under("tied.embedding"), _TALKER.hidden
    tied.normal("text_embedding.weight", (_VOCAB_SIZE, hidden), _EMBEDDING_STD)
    codes = _NUM_CODEBOOKS * _CODEBOOK_SIZE, hidden
    tied.normal("modality_embeddings.0.embedding.weight", codes, _EMBEDDING_STD)
    rules = {"[qk]_norm": parts.constant(_ATTENTION_SHARPNESS)}
    project = parts.normal(_PROJECTION_STD)
    parts.add_layers(weights.under("body"), _TALKER, "qwen3", project, rules)


def _model_config(encoders: tiny.EncoderSize) -> dict[str, object]:
    """Return ``config.json``, with the tokenizer's sizes if these are not released."""
    config: dict[str, object] = {
        "architectures": ["HiggsMultimodalQwen3ForConditionalGeneration"],
        "model_type": MODEL_TYPE,
        "dtype": "bfloat16",
        "audio_token_id": -100,
        "eos_token_id": _CONTROL_IDS[parts.END_OF_TEXT],
        "audio_encoder_config": {
            "model_type": "higgs_audio_encoder",
            "encoder_type": "discrete",
            "num_codebooks": _NUM_CODEBOOKS,
            "vocab_size": _CODEBOOK_SIZE,
            "out_dim": _TALKER.hidden,
            "tie_word_embeddings": True,
            "use_delay_pattern": True,
        },
        "text_config": {
            "model_type": "qwen3",
            "vocab_size": _VOCAB_SIZE,
            **_TALKER.config,
            "head_dim": _TALKER.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "eos_token_id": _CONTROL_IDS[parts.END_OF_TEXT],
        },
    }
    if encoders != "real":
        config[SIZES] = tokenizer_config(encoders, _DECODER_DIM)
    return config
