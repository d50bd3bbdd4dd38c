"""A tiny codec in a checkpoint without a talker, and a stand-in for its tokenizer."""

import shutil
from types import SimpleNamespace

import pytest

from vllm_tts_cache.families.qwen3_tts.family import FAMILY as QWEN3


class Tokenizer:
    """Bytes behind a begin, as the released one puts it."""

    def __init__(self):
        self.added_tokens_decoder = {
            1: SimpleNamespace(content="<eos>", special=True),
            108: SimpleNamespace(content="\n\n", special=False),
        }

    def encode(self, text, *, add_special_tokens):
        return [*([2] if add_special_tokens else []), *text.encode()]


@pytest.fixture
def tokenizer():
    return Tokenizer()


@pytest.fixture(scope="session")
def breeze_checkpoint(tiny, tmp_path_factory):
    """Do not write to it."""
    folder = tmp_path_factory.mktemp("breeze") / "checkpoint"
    shutil.copytree(tiny(QWEN3) / "speech_tokenizer", folder / "audio_tokenizer")
    (folder / "config.json").write_text('{"model_type": "breeze"}')
    return folder
