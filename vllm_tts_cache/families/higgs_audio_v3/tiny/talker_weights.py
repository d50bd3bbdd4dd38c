"""Weights of the talker, in float32.

The embeddings of codes are tied to the output, those of texts are tied to a head that
is never read. With a standard deviation of 1 each position would predict its own code,
whatever came before, and with diffuse attention the text would be drowned by the
reference.
"""

from vllm_tts_cache.families.higgs_audio_v3.tiny import sizes
from vllm_tts_cache.testing.weights import WeightBuilder

_PROJECTION_STD = 0.08
_EMBEDDING_STD = 0.3
_ATTENTION_SHARPNESS = 2.0

_CODES = "tied.embedding.modality_embeddings.0.embedding.weight"


def add_talker(weights: WeightBuilder) -> None:
    """Add all but the tokenizer, under the names that the released file has."""
    hidden = sizes.TALKER.hidden
    text = (sizes.VOCAB_SIZE, hidden)
    weights.normal("tied.embedding.text_embedding.weight", text, _EMBEDDING_STD)
    codes = (sizes.NUM_CODEBOOKS * sizes.CODEBOOK_SIZE, hidden)
    weights.normal(_CODES, codes, _EMBEDDING_STD)
    for index in range(sizes.TALKER.num_layers):
        _add_layer(weights.under(f"body.layers.{index}"))
    weights.fill("body.norm.weight", (hidden,), 1.0)


def _add_layer(layer: WeightBuilder) -> None:
    size = sizes.TALKER
    heads, kv_heads = size.num_heads * size.head_dim, size.num_kv_heads * size.head_dim
    shapes = {
        "self_attn.q_proj": (heads, size.hidden),
        "self_attn.k_proj": (kv_heads, size.hidden),
        "self_attn.v_proj": (kv_heads, size.hidden),
        "self_attn.o_proj": (size.hidden, heads),
        "mlp.gate_proj": (size.intermediate, size.hidden),
        "mlp.up_proj": (size.intermediate, size.hidden),
        "mlp.down_proj": (size.hidden, size.intermediate),
    }
    for name, shape in shapes.items():
        layer.normal(f"{name}.weight", shape, _PROJECTION_STD)
    for norm in ("q_norm", "k_norm"):
        name = f"self_attn.{norm}.weight"
        layer.fill(name, (size.head_dim,), _ATTENTION_SHARPNESS)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        layer.fill(f"{norm}.weight", (size.hidden,), 1.0)
