"""A byte-level tokenizer with the released vocabulary's size and control tokens."""

import json
from pathlib import Path

from tokenizers import pre_tokenizers

from vllm_tts_cache.families.fish_speech.tiny import sizes

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
AUDIO_PAD = "<|audio_pad|>"
FIRST_SEMANTIC_ID = 151_678
LAST_SEMANTIC_ID = FIRST_SEMANTIC_ID + sizes.SEMANTIC_CODEBOOK_SIZE - 1

# Where the released tokenizer has them.
CONTROL_IDS: dict[str, int] = {
    END_OF_TEXT: 151_643,
    IM_START: 151_644,
    IM_END: 151_645,
    **{f"<|speaker:{i}|>": 151_650 + i for i in range(8)},
    "<|phoneme_start|>": 151_671,
    "<|phoneme_end|>": 151_672,
    "<|voice|>": 151_673,
    "<|text|>": 151_674,
    "<|audio_start|>": 151_675,
    "<|audio_end|>": 151_676,
    AUDIO_PAD: 151_677,
}


def save_text_tokenizer(out: Path) -> None:
    """Write ``tokenizer.json`` and the two files that say which tokens are special."""
    special = CONTROL_IDS | {
        f"<|semantic:{code}|>": FIRST_SEMANTIC_ID + code
        for code in range(sizes.SEMANTIC_CODEBOOK_SIZE)
    }
    _save_json(out / "tokenizer.json", _tokenizer(special))
    ends = {"eos_token": IM_END, "pad_token": END_OF_TEXT}
    _save_json(out / "special_tokens_map.json", ends)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 32_768,
        "clean_up_tokenization_spaces": False,
        **ends,
    }
    _save_json(out / "tokenizer_config.json", config)


def _tokenizer(special: dict[str, int]) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token_id, "content": token, **flags, "special": True}
            for token, token_id in special.items()
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
            "vocab": _vocab(special),
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


def _vocab(special: dict[str, int]) -> dict[str, int]:
    """One token for each byte, the special ones, and what no text can reach."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: token_id for token_id, symbol in enumerate(alphabet)} | special
    # The library complains at length about every id that is left out.
    unused = sorted(set(range(sizes.VOCAB_SIZE)) - set(vocab.values()))
    return vocab | {f"<|unused:{token_id}|>": token_id for token_id in unused}


def _save_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
