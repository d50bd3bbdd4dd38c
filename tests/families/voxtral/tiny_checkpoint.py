"""A Voxtral checkpoint in the released layout, without a model."""

import base64
import copy
import json
from types import SimpleNamespace

import numpy as np
from mistral_common.tokens.tokenizers.base import SpecialTokens
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from safetensors.numpy import save_file

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
            "encoder_transformer_lengths_str": "1,1,1,1",
            "decoder_transformer_lengths_str": "1,1,1,1",
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
DECODER = "audio_tokenizer.decoder_blocks.0.conv.weight"
ENCODERS = (
    "audio_tokenizer.input_proj.conv.parametrizations.weight.original0",
    "audio_tokenizer.encoder_blocks.0.layers.0.attention.wq.weight",
)


def write_voxtral_checkpoint(directory, *, with_encoder=False):
    """Fill a directory with all but weights: of these, names that the host goes by."""
    (directory / "params.json").write_text(json.dumps(PARAMS))
    (directory / "tekken.json").write_text(json.dumps(_tokenizer()))
    names = (DECODER, *(ENCODERS if with_encoder else ()))
    save_names(directory / "consolidated.safetensors", *names)
    return directory


def save_names(path, *names):
    save_file({name: np.zeros(1, np.float32) for name in names}, path)


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


def _tokenizer():
    """A token for each byte, behind the control tokens."""
    texts = {t["rank"]: t["token_str"] for t in Tekkenizer.DEPRECATED_SPECIAL_TOKENS}
    texts |= AUDIO_TOKENS
    special = [
        {"rank": n, "token_str": texts.get(n, f"<SPECIAL_{n}>"), "is_control": True}
        for n in range(NUM_SPECIAL)
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
