from pathlib import Path

import numpy as np
import pytest

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.catalogue.record import NewSpeaker
from vllm_tts_cache.catalogue.segment import Segment
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.entrypoints.cli import main
from vllm_tts_cache.entrypoints.storage import open_storage

AUDIO = ReferenceAudio.of(np.sin(np.arange(24_000, dtype=np.float32) / 20), 24_000)


@pytest.fixture
def samples_dir(tmp_path, monkeypatch) -> Path:
    directory = tmp_path / "speakers"
    monkeypatch.setenv("SPEAKER_SAMPLES_DIR", str(directory))
    return directory


def register(audio: ReferenceAudio) -> None:
    storage = open_storage(load_settings())
    new = NewSpeaker(
        name="alice",
        consent="c",
        audio_sha256=audio.audio_sha256,
        num_samples=audio.num_samples,
        sample_rate_hz=audio.sample_rate_hz,
    )
    storage.register(new, audio)
    storage.registry.close()


def leave_audio_without_a_speaker() -> Path:
    storage = open_storage(load_settings())
    path = storage.audio.put(AUDIO, Segment.REGISTERED)
    storage.registry.close()
    return path


def test_a_directory_that_is_not_there_is_not_made(samples_dir, capsys):
    assert main(["verify"]) == 2
    assert not samples_dir.exists()
    assert "Set SPEAKER_SAMPLES_DIR" in capsys.readouterr().err


def test_a_directory_of_something_else_is_left_alone(samples_dir):
    samples_dir.mkdir()
    assert main(["verify", "--repair"]) == 2
    assert list(samples_dir.iterdir()) == []


def test_healthy_voices_are_nothing_wrong(samples_dir, capsys):
    register(AUDIO)
    assert main(["verify"]) == 0
    assert capsys.readouterr().out == f"{samples_dir}: nothing wrong\n"


def test_a_damaged_file_is_named(samples_dir, capsys):
    register(AUDIO)
    [path] = samples_dir.glob("audio/v1/**/*.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    assert main(["verify"]) == 1
    assert str(path) in capsys.readouterr().out


def test_repair_removes_audio_that_no_speaker_has_and_nothing_else(samples_dir, capsys):
    path = leave_audio_without_a_speaker()
    assert main(["verify"]) == 1
    assert path.exists()
    capsys.readouterr()
    assert main(["verify", "--repair"]) == 0
    assert not path.exists()
    assert f"removed audio {AUDIO.audio_sha256}" in capsys.readouterr().out

    register(AUDIO)
    assert main(["verify", "--repair"]) == 0
    assert path.exists()
