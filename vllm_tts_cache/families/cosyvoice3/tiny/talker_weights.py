"""Weights of the talker, in float32 and under the names of ``llm.pt``.

A speech ends by chance: the rows of the output that mean the end are zero, so its
logit is the same in every step, among the likeliest dozen.
"""

from vllm_tts_cache.families.cosyvoice3.tiny import sizes
from vllm_tts_cache.testing.weights import WeightBuilder

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
    _add_layers(model)
    shape = sizes.NUM_TALKER_IDS, hidden
    weights.normal("speech_embedding.weight", shape, _EMBEDDING_STD)
    output = weights.projection("llm_decoder.weight", shape, _CODE_GAIN)
    output[sizes.NUM_CODES :] = 0


def _add_layers(model: WeightBuilder) -> None:
    """Qwen2's decoder layers and the last norm."""
    size = sizes.TALKER
    heads, kv_heads = size.num_heads * size.head_dim, size.num_kv_heads * size.head_dim
    projections = {
        "self_attn.q_proj": (heads, size.hidden, _ATTENTION_GAIN),
        "self_attn.k_proj": (kv_heads, size.hidden, _ATTENTION_GAIN),
        "self_attn.v_proj": (kv_heads, size.hidden, _LAYER_GAIN),
        "self_attn.o_proj": (size.hidden, heads, _LAYER_GAIN),
        "mlp.gate_proj": (size.intermediate, size.hidden, _LAYER_GAIN),
        "mlp.up_proj": (size.intermediate, size.hidden, _LAYER_GAIN),
        "mlp.down_proj": (size.hidden, size.intermediate, _LAYER_GAIN),
    }
    for index in range(size.num_layers):
        layer = model.under(f"layers.{index}")
        for name, (outputs, inputs, gain) in projections.items():
            layer.projection(f"{name}.weight", (outputs, inputs), gain)
            if name.endswith(("q_proj", "k_proj", "v_proj")):
                layer.fill(f"{name}.bias", (outputs,), 0.0)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            layer.fill(f"{norm}.weight", (size.hidden,), 1.0)
    model.fill("norm.weight", (size.hidden,), 1.0)
