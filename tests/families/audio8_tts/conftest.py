"""A stand-in for its tokenizer, and a checkpoint without weights."""

import pytest


class Tokenizer:
    """Bytes."""

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return list(text.encode())


@pytest.fixture
def tokenizer():
    return Tokenizer()


@pytest.fixture
def audio8_checkpoint(tmp_path):
    folder = tmp_path / "audio8"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "arktts"}')
    return folder
