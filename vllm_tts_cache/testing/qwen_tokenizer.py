"""A byte-level BPE tokenizer in Qwen's layout, of a few hundred tokens."""

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
# Of every one of Qwen's.
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)

# How Qwen's tokenizers cut a text into words; public with every Qwen checkpoint.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The prompt's template counts on a role being one token, so roles come often.
_ROLES = ("assistant", "user", "system")
_PROSE = (
    "Hello world, this is a small test of the speech that a server sends while it "
    "speaks. One voice reads what another voice has written, and the listener hears "
    "who it was. The weather was fine in the morning, but there is rain at the other "
    "end of the street. We have been waiting for the train since eight, and nobody "
    "can say when it will come. Please leave your name and your number after the tone."
)
_VOCAB_SIZE = 480


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """A trained tokenizer, its special tokens and the number of all its ids."""

    tokenizer: Tokenizer
    special_tokens: tuple[str, ...]
    vocab_size: int

    def id_of(self, token: str) -> int:
        """The id of a token that is known to exist."""
        token_id = self.tokenizer.token_to_id(token)
        assert token_id is not None, token
        return token_id


def train_text_tokenizer(
    special_tokens: tuple[str, ...] = SPECIAL_TOKENS,
) -> TextTokenizer:
    """Train on a few sentences; the result is always the same.

    Args:
        special_tokens: In the order of their ids, Qwen's own first.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*_ROLES] * 50 + [_PROSE] * 4, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in special_tokens]
    )
    vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
    return TextTokenizer(tokenizer, special_tokens, vocab_size)


def save_text_tokenizer(out: Path, text: TextTokenizer) -> None:
    """Write ``tokenizer.json`` and the older files that official code reads."""
    text.tokenizer.save(str(out / "tokenizer.json"))
    model = json.loads(text.tokenizer.to_str())["model"]
    _save_json(out / "vocab.json", model["vocab"])
    merges = "".join(f"{left} {right}\n" for left, right in model["merges"])
    (out / "merges.txt").write_text(f"#version: 0.2\n{merges}", encoding="utf-8")
    _save_json(out / "tokenizer_config.json", _tokenizer_config(text))


def _tokenizer_config(text: TextTokenizer) -> dict[str, object]:
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": {
            str(text.id_of(token)): {"content": token, **flags, "special": True}
            for token in text.special_tokens
        },
        "additional_special_tokens": list(text.special_tokens[1:]),
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
        "model_max_length": 131_072,
        "split_special_tokens": False,
    }


def _save_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
