"""A tokenizer in Llama's layout, of a few hundred tokens that spell any text.

Letters are tokens, other characters are their bytes. Two Chinese words are tokens as
well, since model and host take such words apart again.
"""

import string
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
)

from vllm_tts_cache.testing.tiny_parts import save_json

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
    merges = [(word[0], word[1]) for word in _WORDS]
    model = models.BPE(
        vocab=text_vocab(),
        merges=merges,
        unk_token=UNKNOWN,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in CONTROL_IDS]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A",
        pair=f"{BEGIN} $A $B:1",
        special_tokens=[(BEGIN, CONTROL_IDS[BEGIN])],
    )
    tokenizer.save(str(out / "tokenizer.json"))
    special = {"unk_token": UNKNOWN, "bos_token": BEGIN, "eos_token": END}
    save_json(out / "special_tokens_map.json", special)
    config = {
        "tokenizer_class": "LlamaTokenizerFast",
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "legacy": True,
        "model_max_length": 32_768,
        **special,
    }
    save_json(out / "tokenizer_config.json", config)
