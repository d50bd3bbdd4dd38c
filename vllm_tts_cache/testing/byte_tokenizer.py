"""A byte-level tokenizer with the released vocabulary's size and control tokens."""

import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import pre_tokenizers


def save_byte_tokenizer(
    out: Path,
    control_ids: Mapping[str, int],
    *,
    end: str,
    pad: str,
    vocab_size: int | None = None,
    **more: str,
) -> None:
    """Write ``tokenizer.json`` and the two files that say which tokens are special.

    Args:
        out: Where to.
        control_ids: Above those of the bytes; what is between them is never used.
        end: The token that ends a text.
        pad: The one that fills up.
        vocab_size: Of all ids; those up to the last control token if None.
        more: Of ``tokenizer_config.json``.
    """
    size = vocab_size or max(control_ids.values()) + 1
    _save_json(out / "tokenizer.json", _tokenizer(control_ids, size))
    ends = {"eos_token": end, "pad_token": pad}
    _save_json(out / "special_tokens_map.json", ends)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 32_768,
        "clean_up_tokenization_spaces": False,
        **ends,
        **more,
    }
    _save_json(out / "tokenizer_config.json", config)


def _tokenizer(control_ids: Mapping[str, int], vocab_size: int) -> dict[str, object]:
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
            "vocab": _vocab(control_ids, vocab_size),
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


def _vocab(control_ids: Mapping[str, int], vocab_size: int) -> dict[str, int]:
    """One token for each byte, the control tokens, and what no text can reach."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: token_id for token_id, symbol in enumerate(alphabet)}
    vocab |= control_ids
    # The library complains at length about every id that is left out.
    unused = sorted(set(range(vocab_size)) - set(vocab.values()))
    return vocab | {f"<|unused:{token_id}|>": token_id for token_id in unused}


def _save_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
