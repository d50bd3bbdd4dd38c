"""Weights of the talker and of its code predictor, in float32.

A random talker says nothing about when to stop, and the host answers a speech
that never ends with an error. So one channel of the residual stream is not random:
channel 0 is 1 where the talker is fed the padding that follows a text, and 0
elsewhere; no layer writes to it, and the logit of the end of speech is read from
it alone. An utterance therefore lasts as long as its text, and then ends by chance.
"""

import re
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu

from vllm_tts_cache.families.qwen3_tts.tiny import sizes
from vllm_tts_cache.families.qwen3_tts.tiny.configs import CODEC_EOS_ID
from vllm_tts_cache.families.qwen3_tts.tiny.sizes import Gains, TransformerSizes
from vllm_tts_cache.testing.tiny_parts import WeightBuilder, add_layers

_TEXT_OVER = 0
# One frame is the sum of 16 code embeddings and a text embedding; at these sizes
# the codes and the text weigh about the same.
_CODE_STD = 0.125
_TEXT_STD = 0.5


def add_talker(
    weights: WeightBuilder,
    gains: Gains,
    *,
    text_vocab_size: int,
    pad_id: int,
    eos_logit: float,
) -> None:
    """Add everything below ``talker.``.

    Args:
        weights: Where to add it.
        gains: How much the prompt matters.
        text_vocab_size: Rows of the text embedding.
        pad_id: The text token that stands where there is no text.
        eos_logit: Mean logit of the end of speech once the text is over.
    """
    talker = weights.under("talker")
    model = talker.under("model")
    _add_layers(model, sizes.TALKER, gains, keep_free=_TEXT_OVER)
    codes = model.normal(
        "codec_embedding.weight",
        (sizes.TALKER_VOCAB_SIZE, sizes.TALKER.hidden),
        _CODE_STD,
    )
    codes[:, _TEXT_OVER] = 0
    _add_text(talker, text_vocab_size, pad_id)
    _add_codec_head(talker, eos_logit / gains.normed_text_over)
    _add_code_predictor(talker.under("code_predictor"), gains)


def _add_text(talker: WeightBuilder, vocab_size: int, pad_id: int) -> None:
    """The text embedding and its projection; both give channel 0 to padding only."""
    width, hidden = sizes.TEXT_HIDDEN, sizes.TALKER.hidden
    embedding = talker.normal("model.text_embedding.weight", (vocab_size, width), 1.0)
    embedding[:, _TEXT_OVER] = 0
    embedding[pad_id, _TEXT_OVER] = 1
    projection = talker.under("text_projection")
    first = projection.projection("linear_fc1.weight", (width, width))
    projection.fill("linear_fc1.bias", (width,), 0.0)
    second = projection.projection("linear_fc2.weight", (hidden, width), 2 * _TEXT_STD)
    projection.fill("linear_fc2.bias", (hidden,), 0.0)
    for weight in (first, second):
        _separate(weight)
    second[_TEXT_OVER, _TEXT_OVER] /= silu(torch.tensor(1.0))


def _separate(weight: Tensor) -> None:
    weight[_TEXT_OVER] = 0
    weight[:, _TEXT_OVER] = 0
    weight[_TEXT_OVER, _TEXT_OVER] = 1


def _add_codec_head(talker: WeightBuilder, eos_weight: float) -> None:
    head = talker.projection(
        "codec_head.weight", (sizes.TALKER_VOCAB_SIZE, sizes.TALKER.hidden)
    )
    head[:, _TEXT_OVER] = 0
    head[CODEC_EOS_ID] = 0
    head[CODEC_EOS_ID, _TEXT_OVER] = eos_weight


def _add_code_predictor(predictor: WeightBuilder, gains: Gains) -> None:
    hidden = sizes.CODE_PREDICTOR.hidden
    _add_layers(predictor.under("model"), sizes.CODE_PREDICTOR, gains)
    for book in range(sizes.NUM_CODEBOOKS - 1):
        embedding = predictor.normal(
            f"model.codec_embedding.{book}.weight",
            (sizes.CODEBOOK_SIZE, hidden),
            _CODE_STD,
        )
        embedding[:, _TEXT_OVER] = 0
        predictor.projection(
            f"lm_head.{book}.weight", (sizes.CODEBOOK_SIZE, hidden), 2.0
        )


def _add_layers(
    model: WeightBuilder,
    size: TransformerSizes,
    gains: Gains,
    keep_free: int | None = None,
) -> None:
    """Qwen3 decoder layers and the last norm; none writes to channel ``keep_free``."""

    def project(layer: WeightBuilder, name: str, shape: Sequence[int]) -> None:
        weight = layer.projection(name, shape, gains.talker_layers)
        if keep_free is not None and re.search("(o|down)_proj", name):
            weight[keep_free] = 0

    add_layers(model, size, project, qk_norm=gains.attention_sharpness)
