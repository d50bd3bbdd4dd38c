"""Write a tiny Higgs Audio v3 checkpoint with random weights. Not a model."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_tts_cache.families.higgs_audio_v3.encoders import CODEC_PREFIX
from vllm_tts_cache.families.higgs_audio_v3.tiny import configs, sizes
from vllm_tts_cache.families.higgs_audio_v3.tiny.sizes import CheckpointOptions
from vllm_tts_cache.families.higgs_audio_v3.tiny.talker_weights import add_talker
from vllm_tts_cache.families.higgs_audio_v3.tiny.text_tokenizer import (
    save_text_tokenizer,
)
from vllm_tts_cache.families.networks.higgs_tokenizer.tiny import (
    add_tokenizer,
    tokenizer_config,
)
from vllm_tts_cache.testing.weights import WeightBuilder

# In float32 it would be most of the file, and nobody compares what it decodes.
_DECODER = "acoustic_decoder."


def write(
    directory: Path, options: CheckpointOptions, report: Callable[[str], None]
) -> None:
    """Fill an empty directory; called through `TINY`."""
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
    config = configs.model_config(options.encoders)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _tokenizer(options: CheckpointOptions) -> dict[str, Tensor]:
    """As other families have it in a folder of its own, but for the decoder's size."""
    weights = WeightBuilder(options.seed)
    add_tokenizer(weights, tokenizer_config(options.encoders, sizes.DECODER_DIM))
    return {
        CODEC_PREFIX + name: tensor.to(torch.bfloat16)
        if name.startswith(_DECODER)
        else tensor
        for name, tensor in weights.tensors.items()
    }
