from pathlib import Path

import pytest

from tests.in_process_workers import clip, store_clip
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.entrypoints.cli import main
from vllm_tts_cache.store.opening import open_store


@pytest.fixture
def samples_dir(tmp_path, monkeypatch) -> Path:
    directory = tmp_path / "speakers"
    monkeypatch.setenv("SPEAKER_SAMPLES_DIR", str(directory))
    return directory


def register(name="alice", audio=None):
    store = open_store(load_settings())
    ref = store_clip(store, clip() if audio is None else audio, name=name)
    path = store.files.file_name(ref.audio_sha256, "audio")
    store.close()
    return Path(path)


def test_a_directory_that_is_not_there_is_not_made(samples_dir, capsys):
    assert main(["verify"]) == 2
    assert not samples_dir.exists()
    assert "Set SPEAKER_SAMPLES_DIR" in capsys.readouterr().err


def test_healthy_voices_are_nothing_wrong(samples_dir, capsys):
    register()
    assert main(["verify"]) == 0
    assert capsys.readouterr().out == f"{samples_dir}: nothing wrong\n"


def test_repair_finishes_a_deletion_and_keeps_every_voice(samples_dir, capsys):
    gone, kept = register("gone", clip(1)), register("kept", clip(2))
    store = open_store(load_settings())
    store.registrations.delete("gone")
    store.close()
    assert main(["verify"]) == 1
    assert gone.exists()
    capsys.readouterr()
    assert main(["verify", "--repair"]) == 0
    assert "repaired: " in capsys.readouterr().out
    assert not gone.exists()
    assert kept.exists()
