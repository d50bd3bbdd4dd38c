"""Where the host says that a checkpoint lies, and that we look there."""

import sys
from types import ModuleType
from typing import Any

import pytest
from vllm_omni.entrypoints.omni_base import omni_snapshot_download

from tests.fake_hub import vllm_config
from vllm_tts_cache.errors import CheckpointError
from vllm_tts_cache.speaker.checkpoint_dir import checkpoint_dir, whole_checkpoint
from vllm_tts_cache.speaker.family import families

ID = "someone/a-model"
LOADING = [family for family in families() if family.encoders_part]


@pytest.fixture
def modelscope(monkeypatch, tmp_path):
    """Its client in the host's process, with one model in its cache."""
    folder = tmp_path / "modelscope" / "hub" / "models" / ID
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    client: Any = ModuleType("modelscope.hub.snapshot_download")
    client.snapshot_download = lambda _model_id: str(folder)
    for name in ("modelscope", "modelscope.hub"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, client.__name__, client)
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "true")
    return folder


@pytest.mark.parametrize("revision", [None, "v2"])
def test_of_modelscope_the_host_makes_a_directory_and_we_take_it(modelscope, revision):
    """Whatever the revision: of this hub the host takes its main one."""
    config = vllm_config(model=omni_snapshot_download(ID), revision=revision)
    assert checkpoint_dir(config.model_config.model, revision) == modelscope
    for family in LOADING:  # what it lacks, its readers name
        assert whole_checkpoint(config, family.side_files) == modelscope


def test_without_modelscope_its_folder_is_none_of_ours(modelscope, monkeypatch):
    monkeypatch.delenv("VLLM_USE_MODELSCOPE")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="neither a directory nor"):
        checkpoint_dir(ID)
