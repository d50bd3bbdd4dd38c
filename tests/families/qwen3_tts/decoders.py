"""The host's codec decoder with random weights, and chunks of requests."""

from typing import Any

import torch
from torch import Tensor
from vllm_omni.model_executor.models.qwen3_tts.tokenizer_12hz import (
    configuration_qwen3_tts_tokenizer_v2 as configurations,
)
from vllm_omni.model_executor.models.qwen3_tts.tokenizer_12hz import (
    modeling_qwen3_tts_tokenizer_v2 as host,
)

SMALL = {
    "codebook_size": 64,
    "hidden_size": 32,
    "latent_dim": 32,
    "codebook_dim": 32,
    "decoder_dim": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
}
# All else is what the official configuration has if a checkpoint says nothing.
RELEASED = {"codebook_dim": 512}
WINDOW = 72
CHUNK = 25


def decoder_of(sizes: dict[str, Any], seed: int = 0) -> Any:
    """Equal sizes and seeds give equal weights."""
    torch.manual_seed(seed)
    config = configurations.Qwen3TTSTokenizerV2DecoderConfig(**sizes)
    decoder = host.Qwen3TTSTokenizerV2Decoder._from_config(config).eval()
    for name, weights in decoder.named_parameters():
        if "embedding_sum" in name:
            torch.nn.init.normal_(weights)
        elif name.endswith(("alpha", "beta")):
            torch.nn.init.normal_(weights, std=0.1)
        elif name.endswith("gamma"):  # else what it scales is hardly heard
            torch.nn.init.constant_(weights, 0.3)
        elif weights.dim() > 1:  # neither silent nor clipped
            torch.nn.init.normal_(weights, std=0.8 * weights[0].numel() ** -0.5)
    settings: Any = decoder
    settings._initial_codec_chunk_frames = 1
    settings._incremental_chunk_frames = CHUNK
    return decoder.requires_grad_(False)


def codes_of(num_frames: int, seed: int = 1, num_codes: int = 64) -> Tensor:
    """``(16, num_frames)``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, num_codes, (16, num_frames), generator=generator)


def decoded(decoder: Any, codes: Tensor, state: dict[str, Any]) -> Tensor:
    """The samples of one chunk of one request. ``codes``: (16, num_frames)."""
    (samples,) = decoder.batched_chunked_decode(
        codes.unsqueeze(0), [codes.shape[1]], caches=[state]
    )
    return samples[0] if samples.dim() == 2 else samples
