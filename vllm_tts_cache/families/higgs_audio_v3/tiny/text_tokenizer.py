"""A byte-level tokenizer with the released vocabulary's size and control tokens."""

import json
from pathlib import Path

from tokenizers import pre_tokenizers

END_OF_TEXT = "<|endoftext|>"

# The first and the last are where the released tokenizer has them: the host's pipeline
# stops at their ids.
CONTROL_IDS: dict[str, int] = {
    END_OF_TEXT: 151_643,
    "<|im_start|>": 151_644,
    "<|im_end|>": 151_645,
    "<|tts|>": 151_666,
    "<|ref_text|>": 151_667,
    "<|ref_audio|>": 151_668,
    "<|text|>": 151_669,
    "<|audio|>": 151_670,
    "<|audio_end|>": 151_671,
}


def save_text_tokenizer(out: Path) -> None:
    """Write ``tokenizer.json`` and the two files that say which tokens are special."""
    _save_json(out / "tokenizer.json", _tokenizer())
    ends = {"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    _save_json(out / "special_tokens_map.json", ends)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 32_768,
        "clean_up_tokenization_spaces": False,
        **ends,
    }
    _save_json(out / "tokenizer_config.json", config)


def _tokenizer() -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token_id, "content": token, **flags, "special": True}
            for token, token_id in CONTROL_IDS.items()
        ],
        "normalizer": None,
        "pre_tokenizer": _byte_level(add_prefix_space=False),
        "post_processor": None,
        "decoder": _byte_level(add_prefix_space=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": _vocab(),
            "merges": [],
        },
    }


def _byte_level(*, add_prefix_space: bool) -> dict[str, object]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": True,
        "use_regex": False,
    }


def _vocab() -> dict[str, int]:
    """One token for each byte, the control tokens, and what no text can reach."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: token_id for token_id, symbol in enumerate(alphabet)} | CONTROL_IDS
    # The library complains at length about every id that is left out.
    unused = sorted(set(range(max(CONTROL_IDS.values()))) - set(vocab.values()))
    return vocab | {f"<|unused:{token_id}|>": token_id for token_id in unused}


def _save_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
