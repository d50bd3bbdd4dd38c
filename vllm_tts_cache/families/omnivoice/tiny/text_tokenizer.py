"""A byte-level tokenizer: every byte of a text is a token, and the controls are one."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from vllm_tts_cache.families.omnivoice.texts import CONTROL_TOKENS

END_OF_TEXT = "<|endoftext|>"


def save_text_tokenizer(out: Path) -> None:
    """Write ``tokenizer.json``, and what the official package reads beside it."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {byte: token_id for token_id, byte in enumerate(bytes_)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token in (END_OF_TEXT, *CONTROL_TOKENS)
        ]
    )
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "model_max_length": 131_072,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
