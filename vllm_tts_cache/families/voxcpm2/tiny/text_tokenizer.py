"""A tokenizer in Llama's layout, of a few hundred tokens that spell any text.

Letters are tokens, other characters are their bytes. Two Chinese words are tokens as
well, since model and host take such words apart again.
"""

import json
import string
from pathlib import Path

UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"
# Where the model's code has them.
CONTROL_IDS: dict[str, int] = {
    UNKNOWN: 0,
    BEGIN: 1,
    END: 2,
    "<|audio_start|>": 101,
    "<|audio_end|>": 102,
    "<|ref_audio_start|>": 103,
    "<|ref_audio_end|>": 104,
}
_SPACE = "▁"
_WORDS = ("你好", "世界")
_FIRST_ID = max(CONTROL_IDS.values()) + 1


def text_vocab() -> dict[str, int]:
    """Every token and its id; ids have no gaps."""
    symbols = [f"<0x{byte:02X}>" for byte in range(256)]
    symbols += [_SPACE, *string.ascii_letters, *string.digits, *string.punctuation]
    symbols += [*"".join(_WORDS), *_WORDS]
    ids = CONTROL_IDS | {s: _FIRST_ID + place for place, s in enumerate(symbols)}
    unused = sorted(set(range(_FIRST_ID)) - set(CONTROL_IDS.values()))
    return ids | {f"<|unused:{token_id}|>": token_id for token_id in unused}


def save_text_tokenizer(out: Path) -> None:
    """Write ``tokenizer.json`` and the two files that say which tokens are special."""
    _save_json(out / "tokenizer.json", _tokenizer())
    special = {"unk_token": UNKNOWN, "bos_token": BEGIN, "eos_token": END}
    _save_json(out / "special_tokens_map.json", special)
    config = {
        "tokenizer_class": "LlamaTokenizerFast",
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "legacy": True,
        "model_max_length": 32_768,
        **special,
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
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": _SPACE,
            "prepend_scheme": "always",
            "split": False,
        },
        "post_processor": _begin_first(),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": UNKNOWN,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": text_vocab(),
            "merges": [list(word) for word in _WORDS],
        },
    }


def _begin_first() -> dict[str, object]:
    begin = {"SpecialToken": {"id": BEGIN, "type_id": 0}}
    one = {"Sequence": {"id": "A", "type_id": 0}}
    other = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [begin, one],
        "pair": [begin, one, other],
        "special_tokens": {
            BEGIN: {"id": BEGIN, "ids": [CONTROL_IDS[BEGIN]], "tokens": [BEGIN]}
        },
    }


def _save_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
