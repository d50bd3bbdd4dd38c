"""Write a tiny OmniVoice checkpoint with random weights. Not a model."""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from vllm_tts_cache.families.networks.higgs_tokenizer.tiny import write_tokenizer
from vllm_tts_cache.families.omnivoice.family import TOKENIZER
from vllm_tts_cache.families.omnivoice.tiny.configs import model_config
from vllm_tts_cache.families.omnivoice.tiny.model_weights import add_model
from vllm_tts_cache.families.omnivoice.tiny.sizes import CheckpointOptions
from vllm_tts_cache.families.omnivoice.tiny.text_tokenizer import save_text_tokenizer
from vllm_tts_cache.testing.weights import WeightBuilder, save_weights


def write(
    directory: Path, options: CheckpointOptions, report: Callable[[str], None]
) -> None:
    """Fill an empty directory.

    Args:
        directory: Where to write.
        options: Equal options give byte-identical files.
        report: Called with the name of each step as it begins.
    """
    report("text tokenizer")
    save_text_tokenizer(directory)
    report("language model")
    config = json.dumps(model_config(), indent=2)
    (directory / "config.json").write_text(config + "\n")
    weights = WeightBuilder(options.seed)
    add_model(weights)
    save_weights(directory / "model.safetensors", weights.tensors, torch.float32)
    report("audio tokenizer")
    write_tokenizer(directory / TOKENIZER, encoders=options.encoders, seed=options.seed)
