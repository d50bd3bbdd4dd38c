import json
import socket

import pytest

from vllm_tts_cache.entrypoints.cli import main, trial
from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.speaker.family import default_family
from vllm_tts_cache.testing.tiny_checkpoint import MARKER


def test_a_new_directory_is_ours_and_stays_ours(tmp_path):
    work = trial.own(tmp_path / "a" / "work")
    (work / "speakers").mkdir()
    assert trial.own(work) == work


def test_an_empty_directory_may_be_used(tmp_path):
    assert trial.own(tmp_path) == tmp_path


def test_somebody_elses_directory_is_left_alone(tmp_path):
    precious = tmp_path / "speakers" / "alice"
    precious.parent.mkdir()
    precious.write_text("voice")
    with pytest.raises(ConfigError, match="choose another directory"):
        trial.own(tmp_path)
    assert main(["demo", "--work", str(tmp_path)]) == 2
    assert [p.name for p in tmp_path.rglob("*")] == ["speakers", "alice"]
    assert precious.read_text() == "voice"


def test_a_file_is_no_work_directory(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is not a directory"):
        trial.own(tmp_path / "file")


def test_emptying_removes_what_an_earlier_run_left(tmp_path):
    (tmp_path / "audio").mkdir()
    (tmp_path / "audio" / "old.wav").write_text("x")
    assert list(trial.emptied(tmp_path / "audio").iterdir()) == []
    assert list(trial.emptied(tmp_path / "logs").iterdir()) == []


def test_the_checkpoint_is_written_once_and_again_when_its_options_changed(tmp_path):
    steps: list[str] = []
    path = trial.tiny_checkpoint(tmp_path, default_family(), steps.append)
    assert steps
    written = (path / "model.safetensors").stat().st_mtime_ns

    steps.clear()
    assert trial.tiny_checkpoint(tmp_path, default_family(), steps.append) == path
    assert not steps
    assert (path / "model.safetensors").stat().st_mtime_ns == written

    options = json.loads((path / MARKER).read_text())
    (path / MARKER).write_text(json.dumps({**options, "seed": 99}))
    trial.tiny_checkpoint(tmp_path, default_family(), steps.append)
    assert steps
    assert json.loads((path / MARKER).read_text()) == options


def test_the_demo_refuses_a_port_that_somebody_serves_on(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        assert main(["demo", "--work", str(tmp_path / "w"), "--port", port]) == 2
    assert "is in use" in capsys.readouterr().err
    assert not (tmp_path / "w").exists()
