"""Write a tiny OmniVoice checkpoint with random weights. Not a model."""

from pathlib import Path

import torch

from vllm_tts_cache.families.networks.higgs_tokenizer.tiny import write_tokenizer
from vllm_tts_cache.families.omnivoice.family import TOKENIZER
from vllm_tts_cache.families.omnivoice.tiny import sizes
from vllm_tts_cache.families.omnivoice.tiny.configs import (
    model_config,
    save_text_tokenizer,
)
from vllm_tts_cache.testing.tiny_checkpoint import EncoderOptions, Report
from vllm_tts_cache.testing.tiny_parts import (
    WeightBuilder,
    add_layers,
    projected,
    save_json,
    save_weights,
)

# Of queries and keys, once they are normed: attention is to see some places more than
# others, or every reference would be the same mean.
_ATTENTION_GAIN = 1.5
_LAYER_GAIN = 2.0
_LOGIT_GAIN = 4.0


def write(directory: Path, options: EncoderOptions, report: Report) -> None:
    """Fill an empty directory; called through `TINY`.

    With ``real`` encoders the audio tokenizer's encode side has its released size.
    """
    report("text tokenizer")
    save_text_tokenizer(directory)
    report("language model")
    save_json(directory / "config.json", model_config())
    weights = WeightBuilder(options.seed)
    add_model(weights)
    save_weights(directory / "model.safetensors", weights.tensors, torch.float32)
    report("audio tokenizer")
    write_tokenizer(directory / TOKENIZER, encoders=options.encoders, seed=options.seed)


def add_model(weights: WeightBuilder) -> None:
    """Add all of it."""
    size, num_audio = sizes.LM, sizes.NUM_CODEBOOKS * sizes.AUDIO_VOCAB_SIZE
    llm = weights.under("llm")
    llm.normal("embed_tokens.weight", (sizes.VOCAB_SIZE, size.hidden), 1.0)
    add_layers(llm, size, projected(_LAYER_GAIN), qk_norm=_ATTENTION_GAIN)
    # A place is the sum of its codebooks, and as loud as a text's.
    std = sizes.NUM_CODEBOOKS**-0.5
    weights.normal("audio_embeddings.weight", (num_audio, size.hidden), std)
    shape = (num_audio, size.hidden)
    weights.projection("audio_heads.weight", shape, _LOGIT_GAIN)
