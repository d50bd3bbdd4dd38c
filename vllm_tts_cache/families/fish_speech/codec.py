"""The whole DAC or one half of it, in its released sizes or smaller ones for tests."""

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from vllm_omni.model_executor.models.fish_speech import dac_modules, dac_utils
from vllm_omni.model_executor.models.fish_speech.dac_modules import DAC, transformer

from vllm_tts_cache.errors import CheckpointError
from vllm_tts_cache.families.fish_speech.sizes import RELEASED, CodecSizes
from vllm_tts_cache.families.networks.dac.encoder import in_the_spelling_of
from vllm_tts_cache.speaker.checkpoint import assign_float32, pick_tensors
from vllm_tts_cache.speaker.checkpoint_dir import read_json

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

_ROTARY, _MASK = "freqs_cis", "causal_mask"
# Half -> the parts that it does not need.
_LEFT_OUT = {
    "encoding": ("decoder", "quantizer.post_module", "quantizer.upsample"),
    "decoding": ("encoder", "quantizer.pre_module", "quantizer.downsample"),
}


def read_sizes(model_dir: Path) -> CodecSizes:
    """Read ``codec.json``; a released model has no such file, and gets `RELEASED`.

    Raises: CheckpointError if the file cannot be read, or a field or a value is wrong.
    """
    path = model_dir / "codec.json"
    if not path.exists():
        return RELEASED
    given = read_json(path)
    units = {"encoder_dim": 4, "decoder_dim": 16}
    names = [field.name for field in fields(CodecSizes)]
    if set(given) - set(names) or not all(
        type(size) is int and size > 0 and size % units.get(name, 1) == 0
        for name, size in given.items()
    ):
        raise CheckpointError(
            str(path),
            f"expected positive integers under {', '.join(names)}; encoder_dim must be "
            "a multiple of 4, decoder_dim of 16",
        )
    return CodecSizes(**given)


def build_codec(sizes: CodecSizes) -> DAC:
    """Build the whole codec, encoder and decoder, without loading weights."""
    if sizes != RELEASED:
        return build_sized_codec(sizes)
    codec = dac_utils.build_dac_codec()
    assert isinstance(codec, DAC)  # the host annotates a wider type
    return codec


def build_sized_codec(sizes: CodecSizes) -> DAC:
    """Build a codec with the released structure, rates, windows and codebooks."""
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

    The whole codec is built, and the whole file checked against it. The codec is built
    on the meta device, because on another one the constructor draws random weights and
    fills 300 MB of masks that are never used.

    Raises: CheckpointError if a tensor of the codec is missing or of another shape.
    """
    with torch.device("meta"):
        codec = build_codec(sizes)
    whole = codec.state_dict()
    state = in_the_spelling_of(whole, state)
    # The other half is checked too, so that a truncated file is refused.
    pick_tensors(_stored(whole), _stored(state), path=path)
    for name in _LEFT_OUT[half]:
        owner, _, part = name.rpartition(".")
        delattr(codec.get_submodule(owner), part)
    rotary = _take_computed_buffers(codec, state)
    weights = {name: state[name] for name in _stored(codec.state_dict())} | rotary
    assign_float32(codec, weights, path=path)
    return codec, weights


def _stored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Leave out the tensors that the constructor computes: a file may have them."""
    return {n: t for n, t in tensors.items() if not n.endswith((_ROTARY, _MASK))}


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
            name, config = f"{owner}.{_ROTARY}", module.config
            with torch.device("cpu"):
                computed = transformer.precompute_freqs_cis(
                    config.block_size, config.head_dim, int(config.rope_base)
                )
            rotary[name] = state.get(name, computed).to(computed.dtype)
    return rotary
