"""The half of the DAC that encodes and the one that decodes, each built alone."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from vllm_omni.model_executor.models.fish_speech.dac_modules import DAC
from vllm_omni.model_executor.models.fish_speech.dac_modules.transformer import (
    Transformer,
    precompute_freqs_cis,
)

from vllm_tts_cache.families.fish_speech.codec import CodecSizes, build_codec
from vllm_tts_cache.families.networks.dac.file import in_the_spelling_of
from vllm_tts_cache.speaker.checkpoint import assign_float32, pick_tensors

_ROTARY, _MASK = "freqs_cis", "causal_mask"


def build_encoding_half(
    sizes: CodecSizes, state: Mapping[str, Tensor], *, path: str
) -> tuple[DAC, dict[str, Tensor]]:
    """The encoding half in float32 on the CPU, and its tensors as the file has them.

    Raises:
        CheckpointError: A tensor of the codec is missing or of another shape.
    """
    return _build_half(sizes, state, path, "decoder", ("post_module", "upsample"))


def build_decoding_half(
    sizes: CodecSizes, state: Mapping[str, Tensor], *, path: str
) -> tuple[DAC, dict[str, Tensor]]:
    """The decoding half in float32 on the CPU, and its tensors as the file has them.

    Raises:
        CheckpointError: A tensor of the codec is missing or of another shape.
    """
    return _build_half(sizes, state, path, "encoder", ("pre_module", "downsample"))


def _build_half(
    sizes: CodecSizes,
    state: Mapping[str, Tensor],
    path: str,
    other_half: str,
    of_quantizer: Sequence[str],
) -> tuple[DAC, dict[str, Tensor]]:
    """Build the whole codec, to compare the whole file with it, and keep a half.

    On the meta device, because the real constructor draws random weights and fills
    300 MB of masks that nothing reads.
    """
    with torch.device("meta"):
        codec = build_codec(sizes)
    whole = codec.state_dict()
    state = in_the_spelling_of(whole, state)
    # The other half is compared too: a file that was cut off is no codec.
    pick_tensors(_stored(whole), _stored(state), path=path)
    delattr(codec, other_half)
    for name in of_quantizer:
        delattr(codec.quantizer, name)
    rotary = _take_computed_buffers(codec, state)
    half = _stored(codec.state_dict())
    weights = {name: state[name] for name in half} | rotary
    assign_float32(codec, weights, path=path)
    return codec, weights


def _stored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without what the constructor computes: a file may have it or not."""
    return {n: t for n, t in tensors.items() if not n.endswith((_ROTARY, _MASK))}


def _take_computed_buffers(
    codec: nn.Module, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Delete the masks; return the rotary frequencies by their full names.

    They are rounded to bfloat16, as the host's buffer rounds them, also where they
    come from the file. Under another rounding other codes come out.
    """
    rotary: dict[str, Tensor] = {}
    for owner, module in codec.named_modules():
        if isinstance(module, Transformer):
            del module.causal_mask  # the window's mask is always used instead
            name, config = f"{owner}.{_ROTARY}", module.config
            with torch.device("cpu"):
                computed = precompute_freqs_cis(
                    config.block_size, config.head_dim, int(config.rope_base)
                )
            rotary[name] = state.get(name, computed).to(computed.dtype)
    return rotary
