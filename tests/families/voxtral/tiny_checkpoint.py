"""A tiny Voxtral checkpoint of random weights, in the released layout. Not a model."""

import base64
import copy
import json
from types import SimpleNamespace

import torch
from mistral_common.tokens.tokenizers.base import SpecialTokens
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from vllm_tts_cache.testing.weights import WeightBuilder, save_weights

# How many prompt positions each takes.
PRESETS = {"neutral_female": 5, "casual_male": 7, "fr_male": 6}
HIDDEN = 256
TRANSFORMER = {
    "dim": HIDDEN,
    "n_layers": 2,
    "head_dim": 64,
    "hidden_dim": 512,
    "n_heads": 4,
    "n_kv_heads": 2,
}
CODEBOOKS = {
    "semantic_codebook_size": 62,
    "acoustic_codebook_size": 21,
    "n_acoustic_codebook": 36,
}
PARAMS = {
    **TRANSFORMER,
    "model_type": "voxtral_tts",
    "vocab_size": 1280,
    "norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "tied_embeddings": True,
    "max_seq_len": 4096,
    "max_position_embeddings": 4096,
    "multimodal": {
        "bos_token_id": 1,
        "audio_model_args": {
            **CODEBOOKS,
            "audio_encoding_args": {"sampling_rate": 24_000, "frame_rate": 12.5},
            "audio_token_id": 24,
            "begin_audio_token_id": 25,
            "acoustic_transformer_args": {
                **TRANSFORMER,
                "n_layers": 1,
                "input_dim": HIDDEN,
                "n_decoding_steps": 7,
            },
        },
        "audio_tokenizer_args": {
            "semantic_codebook_size": CODEBOOKS["semantic_codebook_size"],
            "acoustic_codebook_size": CODEBOOKS["acoustic_codebook_size"],
            "semantic_dim": 32,
            "dim": 64,
            "hidden_dim": 128,
            "head_dim": 16,
            "n_heads": 4,
            "n_kv_heads": 4,
            **{
                f"{half}_transformer_lengths_str": "1,1,1,1"
                for half in ("encoder", "decoder")
            },
            "voice": {name: index for index, name in enumerate(PRESETS)},
        },
    },
}
# Ids as released; the host has some of them as numbers.
AUDIO_TOKENS = {
    24: SpecialTokens.audio,
    25: SpecialTokens.begin_audio,
    34: SpecialTokens.transcribe,
    35: SpecialTokens.audio_to_text,
    36: SpecialTokens.text_to_audio,
}
NUM_SPECIAL = 1000


def write_voxtral_checkpoint(directory, *, with_encoder=False, seed=0):
    """Fill a directory; ``with_encoder`` adds what no released checkpoint has."""
    (directory / "voice_embedding").mkdir()
    (directory / "params.json").write_text(json.dumps(PARAMS))
    (directory / "tekken.json").write_text(json.dumps(_tokenizer()))
    weights = WeightBuilder(seed)
    _add_language_model(weights)
    tensors = weights.tensors | _host_weights(seed, with_encoder=with_encoder)
    save_weights(directory / "consolidated.safetensors", tensors, torch.bfloat16)
    for name, num_tokens in PRESETS.items():
        rows = weights.normal(name, (num_tokens, HIDDEN), 1.0).to(torch.bfloat16)
        torch.save(rows, directory / "voice_embedding" / f"{name}.pt")
    return directory


def host_config(model_dir):
    """The checkpoint's config as the host reads it."""
    from vllm_omni.transformers_utils.parsers import VoxtralTTSConfigParser

    return VoxtralTTSConfigParser().parse(model_dir, trust_remote_code=False)[1]


def host_audio_tokenizer():
    """The host's audio tokenizer, whose first half is the reference encoder."""
    from vllm_omni.model_executor.models.voxtral_tts import voxtral_tts_audio_tokenizer

    multimodal = copy.deepcopy(PARAMS["multimodal"])
    config = SimpleNamespace(
        audio_config={
            "codec_args": multimodal["audio_tokenizer_args"],
            "audio_model_args": multimodal["audio_model_args"],
        },
        text_config=SimpleNamespace(hidden_size=HIDDEN),
    )
    model_config = SimpleNamespace(hf_config=config)
    return voxtral_tts_audio_tokenizer.VoxtralTTSAudioTokenizer(
        vllm_config=SimpleNamespace(model_config=model_config)  # pyright: ignore[reportArgumentType]
    )


def _add_language_model(weights):
    """As released: the embeddings are the output layer as well."""
    num_queries = TRANSFORMER["n_heads"] * TRANSFORMER["head_dim"]
    num_keys = TRANSFORMER["n_kv_heads"] * TRANSFORMER["head_dim"]
    wide = TRANSFORMER["hidden_dim"]
    embeddings = "mm_audio_embeddings.tok_embeddings.weight"
    weights.normal(embeddings, (PARAMS["vocab_size"], HIDDEN), 1.0)
    for number in range(TRANSFORMER["n_layers"]):
        layer = weights.under(f"layers.{number}")
        layer.fill("attention_norm.weight", (HIDDEN,), 1.0)
        layer.fill("ffn_norm.weight", (HIDDEN,), 1.0)
        layer.projection("attention.wq.weight", (num_queries, HIDDEN))
        layer.projection("attention.wk.weight", (num_keys, HIDDEN))
        layer.projection("attention.wv.weight", (num_keys, HIDDEN))
        layer.projection("attention.wo.weight", (HIDDEN, num_queries))
        layer.projection("feed_forward.w1.weight", (wide, HIDDEN))
        layer.projection("feed_forward.w2.weight", (HIDDEN, wide))
        layer.projection("feed_forward.w3.weight", (wide, HIDDEN))
    weights.fill("norm.weight", (HIDDEN,), 1.0)


def _host_weights(seed, *, with_encoder):
    """Those of the host's own networks, under released names."""
    from vllm_omni.model_executor.models.voxtral_tts import voxtral_tts_audio_generation

    audio_model = copy.deepcopy(PARAMS["multimodal"]["audio_model_args"])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokenizer = host_audio_tokenizer()
        networks = {
            "acoustic_transformer": (
                voxtral_tts_audio_generation.FlowMatchingAudioTransformer(audio_model)
            ),
            "audio_tokenizer": tokenizer,
        }
        # It is all zeros at first.
        tokenizer.quantizer.semantic_codebook.embedding_sum.normal_()
    left_out = () if with_encoder else tokenizer._encoder_weight_prefixes
    return {
        _released_name(f"{prefix}.{name}"): tensor.detach()
        for prefix, network in networks.items()
        for name, tensor in network.state_dict().items()
        if network is not tokenizer or not name.startswith(left_out)
    }


def _released_name(name):
    return name.replace(
        "audio_tokenizer.audio_token_embedding.",
        "mm_audio_embeddings.audio_codebook_embeddings.",
    )


def _tokenizer():
    """A token for each byte, behind the control tokens."""
    texts = {t["rank"]: t["token_str"] for t in Tekkenizer.DEPRECATED_SPECIAL_TOKENS}
    texts |= AUDIO_TOKENS
    special = [
        {
            "rank": rank,
            "token_str": texts.get(rank, f"<SPECIAL_{rank}>"),
            "is_control": True,
        }
        for rank in range(NUM_SPECIAL)
    ]
    vocab = [
        {
            "rank": byte,
            "token_bytes": base64.b64encode(bytes([byte])).decode(),
            "token_str": None,
        }
        for byte in range(256)
    ]
    return {
        "config": {
            "pattern": r"\s+|\S+",
            "num_vocab_tokens": len(vocab),
            "default_vocab_size": NUM_SPECIAL + len(vocab),
            "default_num_special_tokens": NUM_SPECIAL,
            "version": "v7",
        },
        "vocab": vocab,
        "special_tokens": special,
        "audio": {
            "sampling_rate": 24_000,
            "frame_rate": 12.5,
            "audio_encoding_config": {
                "num_mel_bins": 128,
                "hop_length": 160,
                "window_size": 400,
            },
            "voice_num_audio_tokens": PRESETS,
        },
    }
