"""A Hugging Face cache as the host leaves it behind, and what is made of it."""

import json
from itertools import product
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from tests.fake_hub import (
    MAIN,
    MODEL,
    OTHER,
    Hub,
    content,
    download,
    path_of,
    use_hub,
    vllm_config,
)
from tests.in_process_workers import SyncInProcessEngine
from vllm_tts_cache.errors import CheckpointError, ConfigError
from vllm_tts_cache.offline import OfflineSpeakers
from vllm_tts_cache.speaker.checkpoint_dir import checkpoint_dir, whole_checkpoint

SIDE_FILES = ("config.json", "codec.pth")
NOWHERE = "http://127.0.0.1:9"  # no machine answers there


@pytest.fixture
def hub(monkeypatch):
    files = product(SIDE_FILES, (MAIN, OTHER))
    hub = Hub({path_of(*each): content(*each) for each in files})
    use_hub(monkeypatch, hub.url)
    yield hub
    huggingface_hub.close_session()
    hub.close()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """HF_HOME; without a hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    use_hub(monkeypatch, NOWHERE)
    yield tmp_path / "hub"
    huggingface_hub.close_session()


def as_the_host_leaves_it(cache):
    """All of main; of the other revision what vLLM fetches: weights and configs."""
    main = download(cache, MAIN, *SIDE_FILES, "model.safetensors", branch="main")
    other = download(cache, OTHER, "config.json", "model.safetensors", branch="v2")
    return main, other


def test_main_is_found_where_the_host_put_it_without_asking_the_hub(cache, hub):
    main, _ = as_the_host_leaves_it(cache)
    for revision in (None, "main", MAIN):
        config = vllm_config(revision=revision)
        assert checkpoint_dir(MODEL, config.model_config.revision) == main
        assert whole_checkpoint(config, SIDE_FILES) == main
    assert hub.asked == []


@pytest.mark.parametrize("revision", ["v2", OTHER])
def test_what_the_host_took_from_main_is_fetched_of_the_revision(cache, hub, revision):
    _, other = as_the_host_leaves_it(cache)
    config = vllm_config(revision=revision)
    assert checkpoint_dir(MODEL, config.model_config.revision) == other
    assert hub.asked == [], "a config is there already"
    assert whole_checkpoint(config, SIDE_FILES) == other
    assert (other / "codec.pth").read_text() == f"codec.pth of {OTHER}"
    assert {path for _, path in hub.asked} == {f"/{MODEL}/resolve/{OTHER}/codec.pth"}
    num_asked = len(hub.asked)
    assert whole_checkpoint(config, SIDE_FILES) == other
    assert len(hub.asked) == num_asked, "the next start finds it"


def test_a_folder_that_a_partial_download_left_is_found(cache):
    """A listing of the tree makes the client refuse a folder that lacks any file."""
    _, other = as_the_host_leaves_it(cache)
    files = {n: {"size": 1, "blob_id": "x"} for n in (*SIDE_FILES, "README.md")}
    tree = json.dumps({"format_version": 1, "files": files})
    (other.parent.parent / "trees" / f"{OTHER}.json").write_text(tree)
    with pytest.raises(FileNotFoundError, match="incomplete"):
        huggingface_hub.snapshot_download(MODEL, revision="v2", local_files_only=True)
    assert checkpoint_dir(MODEL, "v2") == other


def test_without_the_hub_it_says_what_to_download(cache, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # else it tries for long
    as_the_host_leaves_it(cache)
    expected = f"hf download {MODEL} codec.pth --revision {OTHER}$"
    with pytest.raises(CheckpointError, match=expected) as caught:
        whole_checkpoint(vllm_config(revision="v2"), SIDE_FILES)
    assert "\n" not in str(caught.value)


def test_a_file_that_the_revision_does_not_have_is_named(cache, hub):
    _, other = as_the_host_leaves_it(cache)
    del hub.files[f"/{MODEL}/resolve/{OTHER}/codec.pth"]
    with pytest.raises(CheckpointError, match=r"lacks codec\.pth.*404"):
        whole_checkpoint(vllm_config(revision="v2"), SIDE_FILES)
    assert not (other / "codec.pth").exists()


def test_a_model_that_is_nowhere_is_named_with_the_command_that_fetches_it():
    with pytest.raises(CheckpointError, match=f"{MODEL}: .*hf download {MODEL}$"):
        checkpoint_dir(MODEL)
    expected = f"hf download {MODEL} --revision v2 --cache-dir /weights$"
    with pytest.raises(CheckpointError, match=expected):
        checkpoint_dir(MODEL, "v2", download_dir="/weights")
    with pytest.raises(CheckpointError, match="neither a directory nor"):
        checkpoint_dir("no such / name")


# -------- a file of several names

VAE = ("audiovae.safetensors", "audiovae.pth")


@pytest.mark.parametrize("there", VAE)
def test_a_file_of_several_names_is_fetched_under_the_one_it_has(cache, hub, there):
    hub.files[path_of(there, OTHER)] = content(there, OTHER)
    other = download(cache, OTHER, "config.json", branch="v2")
    config = vllm_config(revision="v2")
    assert whole_checkpoint(config, ("config.json", VAE)) == other
    assert [(other / name).is_file() for name in VAE] == [n == there for n in VAE]


def test_off_line_the_host_names_a_folder_of_the_cache_and_that_must_be_whole(cache):
    main, other = as_the_host_leaves_it(cache)
    assert whole_checkpoint(vllm_config(model=str(main)), SIDE_FILES) == main
    expected = f"hf download {MODEL} codec.pth --revision {OTHER} --cache-dir {cache}$"
    with pytest.raises(CheckpointError, match=expected):
        whole_checkpoint(vllm_config(model=str(other)), SIDE_FILES)
    assert checkpoint_dir(str(other)) == other


def test_a_batch_job_reads_the_revision_of_its_engine(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("SPEAKER_SAMPLES_DIR", str(tmp_path / "speakers"))
    main, other = as_the_host_leaves_it(cache)
    (main / "config.json").write_text('{"model_type": "llama"}')
    (other / "config.json").write_text('{"model_type": "fish_qwen3_omni"}')
    with pytest.raises(ConfigError, match="is of no family that we know"):
        OfflineSpeakers(SyncInProcessEngine(model=MODEL))
    speakers = OfflineSpeakers(SyncInProcessEngine(model=MODEL, revision="v2"))
    prompts: Any = speakers._prompts
    assert prompts._model == str(other), "and its tokenizer is of it"
    speakers._store.close()
