"""What a family says that its encoders read is all that they read."""

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants

from tests.fake_hub import MAIN, OTHER, Hub, download, path_of, use_hub, vllm_config
from tests.families.cases import unlike_cases
from vllm_tts_cache.speaker.checkpoint_dir import whole_checkpoint

CPU = torch.device("cpu")
# Of a revision beside main, in the root: weights and the model's config. The sizes of
# a test checkpoint's codec, which released ones do not have, are no file of theirs.
LOADED_BY_THE_HOST = ("*.safetensors", "*.safetensors.index.json", "config.json")
OURS = ("codec.json",)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tmp_path / "hub"


@pytest.fixture
def hub_of(monkeypatch):
    """A hub that has all of a directory as one revision."""
    hubs = []

    def serve(directory):
        files = {
            path_of(str(path.relative_to(directory)), OTHER): path.read_bytes()
            for path in directory.rglob("*")
            if path.is_file()
        }
        hubs.append(Hub(files))
        use_hub(monkeypatch, hubs[-1].url)
        return hubs[-1]

    yield serve
    huggingface_hub.close_session()
    for hub in hubs:
        hub.close()


def as_the_host_leaves_it(cache, checkpoint):
    """A revision's folder with what the host loads of it."""
    folder = download(cache, OTHER, branch="v2")
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in (*LOADED_BY_THE_HOST, *OURS):
        for path in checkpoint.glob(pattern):
            if not path.name.startswith("audiovae."):
                (folder / path.name).write_bytes(path.read_bytes())
    download(cache, MAIN, "config.json", branch="main")
    return folder


@unlike_cases
def test_a_revisions_files_of_the_host_and_ours_suffice(case, tiny, cache, hub_of):
    checkpoint = tiny(case.family)
    hub = hub_of(checkpoint)
    folder = as_the_host_leaves_it(cache, checkpoint)
    config = vllm_config(revision="v2")
    assert whole_checkpoint(config, case.family.side_files) == folder
    load = case.family.part("encoders_part")
    found, expected = load(folder, CPU), load(checkpoint, CPU)
    assert {name: e.fingerprint for name, e in found.items()} == {
        name: e.fingerprint for name, e in expected.items()
    }
    # Of some families the host loads all that the encoders read.
    left_out = set(case.family.side_files) - {"config.json"}
    assert bool(hub.asked) is bool(left_out)
