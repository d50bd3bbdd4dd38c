"""How tiny checkpoints are written: whole or not at all, and over nobody's work."""

import pytest

from tests.tiny_files import contents
from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.speaker.family import default_family
from vllm_tts_cache.testing.tiny_checkpoint import TinyCheckpoint

TINY = TinyCheckpoint(default_family())


def test_what_is_not_ours_is_left_alone_even_with_force(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").write_text("three years of work")
    (tmp_path / "file").write_text("a file")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = contents(tmp_path)
    for name, says in (
        ("work", "left alone"),
        ("file", "is no directory"),
        ("link", "is no directory"),
    ):
        with pytest.raises(ConfigError, match=says):
            TINY.write(tmp_path / name, force=True)
    assert contents(tmp_path) == before


def test_an_empty_directory_is_filled_and_ours_is_replaced_with_force_only(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    assert TINY.write(out) == out
    (out / "stale").write_text("from the run before")
    with pytest.raises(ConfigError, match="--force"):
        TINY.write(out)
    assert (out / "stale").exists()
    TINY.write(out, force=True)
    assert not (out / "stale").exists()
    assert list(tmp_path.iterdir()) == [out]


def test_an_interrupted_run_leaves_what_was_there(tmp_path):
    out = TINY.write(tmp_path / "out")
    before = contents(out)

    def interrupt(step: str) -> None:
        if step == "speech tokenizer":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        TinyCheckpoint(default_family(), seed=1).write(out, interrupt, force=True)
    assert contents(out) == before
    assert list(tmp_path.iterdir()) == [out]
