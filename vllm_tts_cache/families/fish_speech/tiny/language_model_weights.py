"""Weights of the slow and of the fast autoregressive model, in float32.

The gains were found by measuring, on a server: under them eighteen pairs of a voice
and a text gave eighteen different audios. The embeddings are tied to the output; with
a standard deviation of 1 each position would predict its own token, whatever came
before, and with diffuse attention the text would be drowned by the reference.
"""

from vllm_tts_cache.families.fish_speech.tiny import sizes
from vllm_tts_cache.families.fish_speech.tiny.sizes import TransformerSizes
from vllm_tts_cache.testing.weights import WeightBuilder

_PROJECTION_STD = 0.08
_EMBEDDING_STD = 0.3
_ATTENTION_SHARPNESS = 2.0


def add_slow_ar(weights: WeightBuilder) -> None:
    """Add everything below ``text_model.``."""
    model = weights.under("text_model.model")
    shape = (sizes.VOCAB_SIZE, sizes.SLOW_AR.hidden)
    model.normal("embeddings.weight", shape, _EMBEDDING_STD)
    _add_layers(model, sizes.SLOW_AR, qk_norm=True)


def add_fast_ar(weights: WeightBuilder) -> None:
    """Add everything below ``audio_decoder.``, the slow one's code embeddings too."""
    decoder = weights.under("audio_decoder")
    size, hidden = sizes.FAST_AR, sizes.FAST_AR.hidden
    num_codes = sizes.SEMANTIC_CODEBOOK_SIZE
    decoder.normal(
        "codebook_embeddings.weight",
        (num_codes * sizes.NUM_CODEBOOKS, sizes.SLOW_AR.hidden),
        _EMBEDDING_STD,
    )
    decoder.normal("embeddings.weight", (num_codes, hidden), 1.0)
    decoder.normal("output.weight", (num_codes, hidden), _PROJECTION_STD)
    _add_layers(decoder, size, qk_norm=False)


def _add_layers(model: WeightBuilder, size: TransformerSizes, *, qk_norm: bool) -> None:
    """All layers and the last norm."""
    heads, kv_heads = size.num_heads * size.head_dim, size.num_kv_heads * size.head_dim
    shapes = {
        "attention.wqkv": (heads + 2 * kv_heads, size.hidden),
        "attention.wo": (size.hidden, heads),
        "feed_forward.w1": (size.intermediate, size.hidden),
        "feed_forward.w2": (size.hidden, size.intermediate),
        "feed_forward.w3": (size.intermediate, size.hidden),
    }
    for index in range(size.num_layers):
        layer = model.under(f"layers.{index}")
        for name, shape in shapes.items():
            layer.normal(f"{name}.weight", shape, _PROJECTION_STD)
        for norm in ("q_norm", "k_norm") if qk_norm else ():
            layer.fill(
                f"attention.{norm}.weight", (size.head_dim,), _ATTENTION_SHARPNESS
            )
        for norm in ("attention_norm", "ffn_norm"):
            layer.fill(f"{norm}.weight", (size.hidden,), 1.0)
    model.fill("norm.weight", (size.hidden,), 1.0)
