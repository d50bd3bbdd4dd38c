"""Weights of talker and flow, float32, by the names of ``llm.pt`` and ``flow.pt``.

A speech ends by chance: the rows of the output that mean the end are zero, so its
logit is the same in every step, among the likeliest dozen.
"""

import re
from collections.abc import Sequence

import torch

from vllm_tts_cache.families.cosyvoice3.tiny import sizes
from vllm_tts_cache.testing.tiny_parts import WeightBuilder, add_layers

_TIME_SIZE = 256
_POSITION_KERNEL, _POSITION_GROUPS = 31, 16
_ROTARY_BASE = 10_000
# Of what modulates each layer by the time, the gates among it.
_MODULATION_GAIN = 0.5

_EMBEDDING_STD = 1.0
# Diffuse attention would dilute what few positions say of a voice and a text.
_ATTENTION_GAIN = 2.0
_LAYER_GAIN = 1.5
# The end's logit is log(200); with this much, one code in twenty ends a speech once it
# may. The likeliest 25 of as many normal draws lie between 2.7 and 3.8 deviations.
_CODE_GAIN = 1.75


def add_talker(weights: WeightBuilder) -> None:
    """Add the language model, and the tables and the output of its codes."""
    hidden = sizes.TALKER.hidden
    model = weights.under("llm.model.model")
    model.normal("embed_tokens.weight", (sizes.TEXT_VOCAB_SIZE, hidden), _EMBEDDING_STD)
    add_layers(model, sizes.TALKER, _add_projection)
    shape = sizes.NUM_TALKER_IDS, hidden
    weights.normal("speech_embedding.weight", shape, _EMBEDDING_STD)
    output = weights.projection("llm_decoder.weight", shape, _CODE_GAIN)
    output[sizes.NUM_CODES :] = 0


def _add_projection(layer: WeightBuilder, name: str, shape: Sequence[int]) -> None:
    is_compared = re.search("(q|k)_proj", name)
    layer.projection(name, shape, _ATTENTION_GAIN if is_compared else _LAYER_GAIN)
    if re.search("(q|k|v)_proj", name):
        layer.fill(name.replace("weight", "bias"), shape[:1], 0.0)


def add_flow(weights: WeightBuilder) -> None:
    """Add all of it: from speech tokens and a vector to a mel."""
    mels = sizes.NUM_MELS
    weights.normal("input_embedding.weight", (sizes.NUM_CODES, mels), 1.0)
    weights.linear("spk_embed_affine_layer", sizes.SPEAKER_SIZE, mels, 8.0)
    lookahead = weights.under("pre_lookahead_layer")
    _add_conv(lookahead, "conv1", (sizes.LOOKAHEAD_CHANNELS, mels, 4))
    _add_conv(lookahead, "conv2", (mels, sizes.LOOKAHEAD_CHANNELS, 3))
    _add_estimator(weights.under("decoder.estimator"))


def _add_estimator(estimator: WeightBuilder) -> None:
    width, mels = sizes.DIT_WIDTH, sizes.NUM_MELS
    estimator.linear("time_embed.time_mlp.0", _TIME_SIZE, width)
    estimator.linear("time_embed.time_mlp.2", width, width)
    # Of the noise, the reference's mel, the tokens and the speaker.
    estimator.linear("input_embed.proj", 4 * mels, width)
    for conv in ("conv1", "conv2"):
        shape = width, width // _POSITION_GROUPS, _POSITION_KERNEL
        _add_conv(estimator, f"input_embed.conv_pos_embed.{conv}.0", shape)
    steps = torch.arange(0, sizes.DIT_HEAD_SIZE, 2).float() / sizes.DIT_HEAD_SIZE
    frequencies = estimator.fill("rotary_embed.inv_freq", steps.shape, 0.0)
    frequencies.copy_(1.0 / _ROTARY_BASE**steps)
    for index in range(sizes.DIT_DEPTH):
        _add_block(estimator.under(f"transformer_blocks.{index}"))
    estimator.linear("norm_out.linear", width, 2 * width, _MODULATION_GAIN)
    estimator.linear("proj_out", width, mels)


def _add_block(block: WeightBuilder) -> None:
    width, inner = sizes.DIT_WIDTH, sizes.DIT_HEADS * sizes.DIT_HEAD_SIZE
    block.linear("attn_norm.linear", width, 6 * width, _MODULATION_GAIN)
    for name in ("to_q", "to_k", "to_v"):
        block.linear(f"attn.{name}", width, inner)
    block.linear("attn.to_out.0", inner, width)
    block.linear("ff.ff.0.0", width, 2 * width)
    block.linear("ff.ff.2", 2 * width, width)


def _add_conv(weights: WeightBuilder, name: str, shape: tuple[int, int, int]) -> None:
    """A convolution ``(out, in, kernel)``."""
    weights.projection(f"{name}.weight", shape)
    weights.fill(f"{name}.bias", shape[:1], 0.0)
