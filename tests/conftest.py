"""What tests of several levels share; heavy imports wait until they are needed."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def qwen3_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-TTS Base checkpoint that tells clips apart; do not write to it."""
    from vllm_tts_cache.testing.qwen3_tts.write import write_qwen3_tts_checkpoint

    return write_qwen3_tts_checkpoint(tmp_path_factory.mktemp("qwen3-tts") / "tiny")


@pytest.fixture(scope="session")
def fish_speech_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Fish Speech S2 Pro checkpoint with a small codec; do not write to it."""
    from vllm_tts_cache.testing.fish_speech.write import write_fish_speech_checkpoint

    return write_fish_speech_checkpoint(tmp_path_factory.mktemp("fish-speech") / "tiny")
