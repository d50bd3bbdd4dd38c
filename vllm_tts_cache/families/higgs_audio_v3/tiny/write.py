"""Write a tiny Higgs Audio v3 checkpoint with random weights. Not a model."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_tts_cache.families.higgs_audio_v3.encoders import CODEC_PREFIX
from vllm_tts_cache.families.higgs_audio_v3.tiny import configs, sizes
from vllm_tts_cache.families.higgs_audio_v3.tiny.configs import save_text_tokenizer
from vllm_tts_cache.families.networks.higgs_tokenizer.tiny import (
    add_tokenizer,
    tokenizer_config,
)
from vllm_tts_cache.testing.tiny_checkpoint import EncoderOptions, Report
from vllm_tts_cache.testing.tiny_parts import (
    WeightBuilder,
    add_layers,
    normal,
    save_json,
)

_PROJECTION_STD = 0.08
_EMBEDDING_STD = 0.3
_ATTENTION_SHARPNESS = 2.0
_CODES = "tied.embedding.modality_embeddings.0.embedding.weight"

# In float32 it would be most of the file, and nobody compares what it decodes.
_DECODER = "acoustic_decoder."


def write(directory: Path, options: EncoderOptions, report: Report) -> None:
    """Fill an empty directory; called through `TINY`.

    With ``real`` encoders the tokenizer's encode side has its released size.
    """
    report("text tokenizer")
    save_text_tokenizer(directory)
    report("talker")
    weights = WeightBuilder(options.seed)
    add_talker(weights)
    tensors = {name: t.to(torch.bfloat16) for name, t in weights.tensors.items()}
    report("audio tokenizer")
    tensors |= _tokenizer(options)
    ordered = {name: tensors[name].contiguous() for name in sorted(tensors)}
    save_file(ordered, directory / "model.safetensors", metadata={"format": "pt"})
    save_json(directory / "config.json", configs.model_config(options.encoders))


def _tokenizer(options: EncoderOptions) -> dict[str, Tensor]:
    """As other families have it in a folder of its own, but for the decoder's size."""
    weights = WeightBuilder(options.seed)
    add_tokenizer(weights, tokenizer_config(options.encoders, sizes.DECODER_DIM))
    return {
        CODEC_PREFIX + name: tensor.to(torch.bfloat16)
        if name.startswith(_DECODER)
        else tensor
        for name, tensor in weights.tensors.items()
    }


def add_talker(weights: WeightBuilder) -> None:
    """Add all but the tokenizer, under the names that the released file has."""
    hidden = sizes.TALKER.hidden
    text = (sizes.VOCAB_SIZE, hidden)
    weights.normal("tied.embedding.text_embedding.weight", text, _EMBEDDING_STD)
    codes = (sizes.NUM_CODEBOOKS * sizes.CODEBOOK_SIZE, hidden)
    weights.normal(_CODES, codes, _EMBEDDING_STD)
    body, project = weights.under("body"), normal(_PROJECTION_STD)
    add_layers(body, sizes.TALKER, project, qk_norm=_ATTENTION_SHARPNESS)
