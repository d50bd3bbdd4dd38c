"""The whole DAC or one half of it, in its released sizes or smaller ones for tests."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from vllm_omni.model_executor.models.fish_speech import dac_modules, dac_utils
from vllm_omni.model_executor.models.fish_speech.dac_modules import DAC, transformer

from vllm_tts_cache.families.fish_speech.sizes import RELEASED, CodecSizes
from vllm_tts_cache.families.networks.dac.encoder import keep_half
from vllm_tts_cache.speaker.checkpoint import assign_float32

SAMPLE_RATE_HZ = dac_utils.DAC_SAMPLE_RATE
SAMPLES_PER_FRAME = dac_utils.DAC_HOP_LENGTH
NUM_CODEBOOKS = dac_utils.DAC_NUM_CODEBOOKS

_HEAD_DIM = 64
_ATTENTION: dict[str, Any] = {
    "n_local_heads": -1,  # as many as heads
    "head_dim": _HEAD_DIM,
    "rope_base": 10_000,
    "norm_eps": 1e-5,
    "dropout_rate": 0.0,
    "attn_dropout_rate": 0.0,
    "channels_first": True,
}

# Half -> the parts that it does not need.
_LEFT_OUT = {
    "encoding": ("decoder", "quantizer.post_module", "quantizer.upsample"),
    "decoding": ("encoder", "quantizer.pre_module", "quantizer.downsample"),
}


def build_codec(sizes: CodecSizes) -> DAC:
    """Build the whole codec, encoder and decoder, without loading weights.

    Of another size it has the released structure, rates, windows and codebooks.
    """
    if sizes == RELEASED:
        released: Any = dac_utils.build_dac_codec()
        return released
    return DAC(
        encoder_dim=sizes.encoder_dim,
        encoder_rates=[2, 4, 8, 8],
        decoder_dim=sizes.decoder_dim,
        decoder_rates=[8, 8, 4, 2],
        quantizer=_quantizer(sizes),
        sample_rate=SAMPLE_RATE_HZ,
        causal=True,
        encoder_transformer_layers=[0, 0, 0, sizes.encoder_layers],
        decoder_transformer_layers=[4, 0, 0, 0],
        transformer_general_config=partial(
            dac_modules.ModelArgs, block_size=16_384, **_ATTENTION
        ),
    )


def _quantizer(sizes: CodecSizes) -> dac_modules.DownsampleResidualVectorQuantize:
    width = sizes.latent_dim
    attention = dac_modules.ModelArgs(
        block_size=4_096,
        n_layer=sizes.quantizer_layers,
        n_head=width // _HEAD_DIM,
        dim=width,
        intermediate_size=3 * width,
        **_ATTENTION,
    )

    def window() -> dac_modules.WindowLimitedTransformer:
        return dac_modules.WindowLimitedTransformer(
            causal=True, window_size=128, input_dim=width, config=attention
        )

    return dac_modules.DownsampleResidualVectorQuantize(
        input_dim=width,
        n_codebooks=NUM_CODEBOOKS - 1,
        codebook_size=1_024,
        codebook_dim=8,
        quantizer_dropout=0.0,
        downsample_factor=(2, 2),  # pyright: ignore[reportArgumentType]
        post_module=window(),
        pre_module=window(),
        semantic_codebook_size=4_096,
    )


def build_half(
    half: Literal["encoding", "decoding"],
    sizes: CodecSizes,
    state: Mapping[str, Tensor],
    *,
    path: str,
) -> tuple[DAC, dict[str, Tensor]]:
    """Return a half in float32 on the CPU, and its tensors as in the file.

    The codec is built on the meta device, because on another one the constructor draws
    random weights and fills 300 MB of masks that are never used.

    Raises: CheckpointError if a tensor of the codec is missing or of another shape.
    """
    with torch.device("meta"):
        codec = build_codec(sizes)
    weights = keep_half(codec, state, _LEFT_OUT[half], path=path)
    weights |= _take_computed_buffers(codec, state)
    assign_float32(codec, weights, path=path)
    return codec, weights


def _take_computed_buffers(
    codec: nn.Module, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Delete the masks; return the rotary frequencies by their full names.

    The frequencies are rounded to bfloat16 as in the host's buffer, even if they come
    from the file: another rounding would give other codes.
    """
    rotary: dict[str, Tensor] = {}
    for owner, module in codec.named_modules():
        if isinstance(module, transformer.Transformer):
            del module.causal_mask  # the window's mask is always used instead
            name, config = f"{owner}.freqs_cis", module.config
            with torch.device("cpu"):
                computed = transformer.precompute_freqs_cis(
                    config.block_size, config.head_dim, int(config.rope_base)
                )
            rotary[name] = state.get(name, computed).to(computed.dtype)
    return rotary
