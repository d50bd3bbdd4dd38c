"""A byte-level tokenizer with the released vocabulary's size and control tokens."""

import json
from collections.abc import Mapping
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


def save_text_tokenizer(
    out: Path,
    control_ids: Mapping[str, int] = CONTROL_IDS,
    end: str = END_OF_TEXT,
    **more: str,
) -> None:
    """Write ``tokenizer.json`` and the two files that say which tokens are special.

    Args:
        out: Where to.
        control_ids: Above those of the bytes; what is between them is never used.
        end: The token that ends a text.
        more: Of ``tokenizer_config.json``.
    """
    _save_json(out / "tokenizer.json", _tokenizer(control_ids))
    ends = {"eos_token": end, "pad_token": end}
    _save_json(out / "special_tokens_map.json", ends)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 32_768,
        "clean_up_tokenization_spaces": False,
        **ends,
        **more,
    }
    _save_json(out / "tokenizer_config.json", config)


def _tokenizer(control_ids: Mapping[str, int]) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token_id, "content": token, **flags, "special": True}
            for token, token_id in control_ids.items()
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
            "vocab": _vocab(control_ids),
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


def _vocab(control_ids: Mapping[str, int]) -> dict[str, int]:
    """One token for each byte, the control tokens, and what no text can reach."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: token_id for token_id, symbol in enumerate(alphabet)}
    vocab |= control_ids
    # The library complains at length about every id that is left out.
    unused = sorted(set(range(max(control_ids.values()))) - set(vocab.values()))
    return vocab | {f"<|unused:{token_id}|>": token_id for token_id in unused}


def _save_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
