"""A tiny Higgs Audio v2 checkpoint with random weights, for the host's own classes."""

import json

import torch

from vllm_tts_cache.families.higgs_audio_v2.family import MODEL_TYPE, TOKENIZER_FOLDER
from vllm_tts_cache.families.networks.higgs_tokenizer.tiny import write_tokenizer
from vllm_tts_cache.testing.tiny_parts import (
    WeightBuilder,
    save_byte_tokenizer,
    save_weights,
)

HIDDEN, INTERMEDIATE, NUM_LAYERS, HEAD_DIM = 64, 192, 2, 32
VOCAB_SIZE, NUM_CODES = 128_256, 8 * 1_026
CONTROL_IDS = {
    "<|begin_of_text|>": 128_000,
    "<|end_of_text|>": 128_001,
    "<|start_header_id|>": 128_006,
    "<|end_header_id|>": 128_007,
    "<|eot_id|>": 128_009,
    "<|audio_eos|>": 128_012,
    "<|audio_out_bos|>": 128_013,
    "<|reserved_special_token_6|>": 128_014,
    "<|AUDIO|>": 128_015,
    "<|AUDIO_OUT|>": 128_016,
}
CHAT_TEMPLATE = (
    "<|begin_of_text|>{% for turn in messages %}"
    "<|start_header_id|>{{ turn.role }}<|end_header_id|>\n\n"
    "{% if turn.content is string %}{{ turn.content }}{% else %}"
    "{% for part in turn.content %}{% if part.type == 'audio' %}"
    "<|audio_out_bos|><|AUDIO_OUT|><|audio_eos|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n<|audio_out_bos|>{% endif %}"
)


def write_higgs_audio_v2_checkpoint(directory, *, tokenizer=True, seed=0):
    """With the audio tokenizer or without; the directory is absent."""
    directory.mkdir()
    end = "<|eot_id|>"
    save_byte_tokenizer(
        directory, CONTROL_IDS, end=end, pad=end, chat_template=CHAT_TEMPLATE
    )
    (directory / "config.json").write_text(json.dumps(config(), indent=2))
    weights = WeightBuilder(seed)
    add_talker(weights)
    save_weights(directory / "model.safetensors", weights.tensors, torch.bfloat16)
    if tokenizer:
        write_tokenizer(directory / TOKENIZER_FOLDER, encoders="tiny", seed=seed)
    return directory


def config():
    return {
        "architectures": ["HiggsAudioV2ForConditionalGeneration"],
        "model_type": MODEL_TYPE,
        "dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": HIDDEN // HEAD_DIM,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 4_096,
        "tie_word_embeddings": False,
        "num_codebooks": 8,
        "codebook_size": 1_026,
        "audio_token_id": CONTROL_IDS["<|AUDIO_OUT|>"],
        "audio_bos_token_id": CONTROL_IDS["<|audio_out_bos|>"],
        "audio_delay_token_id": CONTROL_IDS["<|reserved_special_token_6|>"],
        "eos_token_id": CONTROL_IDS["<|eot_id|>"],
        "pad_token_id": CONTROL_IDS["<|end_of_text|>"],
        "audio_tokenizer_id": None,
        "audio_tokenizer_subdir": TOKENIZER_FOLDER,
    }


def add_talker(weights):
    codes = (NUM_CODES, HIDDEN)
    model = weights.under("model")
    model.normal("embed_tokens.weight", (VOCAB_SIZE, HIDDEN), 0.3)
    model.normal("embed_audio_tokens.embed_audio_tokens.weight", codes, 0.3)
    for index in range(NUM_LAYERS):
        add_layer(model.under(f"layers.{index}"))
    model.fill("norm.weight", (HIDDEN,), 1.0)
    weights.normal("audio_lm_head.weight", codes, 0.3)
    weights.normal("text_lm_head.weight", (VOCAB_SIZE, HIDDEN), 0.3)


def add_layer(layer):
    for name, outputs in (("q", HIDDEN), ("k", HEAD_DIM), ("v", HEAD_DIM)):
        layer.projection(f"self_attn.{name}_proj.weight", (outputs, HIDDEN))
    layer.projection("self_attn.o_proj.weight", (HIDDEN, HIDDEN))
    for kind in ("", "audio_"):
        mlp = layer.under(f"{kind}mlp")
        for name in ("gate", "up"):
            mlp.projection(f"{name}_proj.weight", (INTERMEDIATE, HIDDEN))
        mlp.projection("down_proj.weight", (HIDDEN, INTERMEDIATE))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            layer.fill(f"{kind}{norm}.weight", (HIDDEN,), 1.0)
