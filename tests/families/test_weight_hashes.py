"""A start does not hash again what an earlier one hashed, unless a file has changed."""

import json
import os
import shutil

import pytest
import torch

from tests.families.cases import cases
from vllm_tts_cache.speaker import checkpoint
from vllm_tts_cache.speaker.checkpoint import HASHES_NAME, remembered

CPU = torch.device("cpu")
FAMILIES = [case.family for case in cases() if case.family.encoders]

every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)


@pytest.fixture
def hashed(monkeypatch):
    """Weights that were hashed, a number each time."""
    compute, hashed = checkpoint.weights_sha256, []

    def counted(tensors):
        hashed.append(len(tensors))
        return compute(tensors)

    monkeypatch.setattr(checkpoint, "weights_sha256", counted)
    return hashed


@pytest.fixture
def settled(monkeypatch):
    """The checkpoints of a test are written while it runs."""
    monkeypatch.setattr(checkpoint, "_SETTLED_SECONDS", 0.0)


@pytest.fixture
def copied(tiny, tmp_path):
    return lambda family: shutil.copytree(tiny(family), tmp_path / "checkpoint")


def fingerprints(family, directory):
    encoders = family.part("encoders_part")(directory, CPU)
    return {name: encoder.fingerprint for name, encoder in encoders.items()}


@every_family
@pytest.mark.usefixtures("settled")
def test_what_has_not_changed_is_hashed_once(family, tiny, tmp_path, hashed):
    plain = fingerprints(family, tiny(family))
    at_once = len(hashed)
    assert at_once > 0
    for _ in range(3):
        with remembered(tmp_path):
            assert fingerprints(family, tiny(family)) == plain
    assert len(hashed) <= 2 * at_once


@every_family
@pytest.mark.usefixtures("settled")
def test_a_file_that_was_written_again_is_hashed_again(
    family, copied, tmp_path, hashed
):
    directory = copied(family)
    with remembered(tmp_path):
        plain = fingerprints(family, directory)
    hashed.clear()
    for path in directory.rglob("*"):
        if path.is_file():
            times = path.stat()
            path.write_bytes(path.read_bytes())
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with remembered(tmp_path):
        assert fingerprints(family, directory) == plain
    assert hashed


def test_a_file_that_was_written_just_now_is_not_trusted(tiny, copied, tmp_path):
    with remembered(tmp_path):
        fingerprints(FAMILIES[0], copied(FAMILIES[0]))
    assert not (tmp_path / HASHES_NAME).exists()


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("kept", [b"", b"[]", b"{", b"\xff", b"7"])
def test_a_file_of_hashes_that_cannot_be_read_is_as_good_as_none(tiny, tmp_path, kept):
    plain = fingerprints(FAMILIES[0], tiny(FAMILIES[0]))
    (tmp_path / HASHES_NAME).write_bytes(kept)
    with remembered(tmp_path):
        assert fingerprints(FAMILIES[0], tiny(FAMILIES[0])) == plain
    assert json.loads((tmp_path / HASHES_NAME).read_bytes())


@pytest.mark.usefixtures("settled")
def test_the_next_start_hashes_again_where_nothing_can_be_kept(
    tiny, tmp_path, plugin_log
):
    (tmp_path / "file").touch()
    for _ in range(2):
        with remembered(tmp_path / "file"):
            assert fingerprints(FAMILIES[0], tiny(FAMILIES[0]))
    assert "hashes the encoders' weights again" in plugin_log.text


@pytest.mark.usefixtures("settled")
def test_tensors_of_one_name_and_shape_are_told_apart(tmp_path):
    """Two networks of one file, each without the prefix of its names."""
    file = tmp_path / "weights"
    file.touch()
    with remembered(tmp_path):
        checkpoint.reads(file)
        found = [
            checkpoint.sha256_of({"weight": torch.full((9_000,), value)}, str)
            for value in (0.5, 0.25)
        ]
    assert found[0] != found[1]


@pytest.mark.usefixtures("settled")
def test_those_that_are_kept_are_bounded(tmp_path):
    file = tmp_path / "weights"
    file.touch()
    for number in range(3):
        with remembered(tmp_path):
            checkpoint.reads(file)
            for value in range(200):
                tensors = {"weight": torch.tensor([number, value])}
                checkpoint.sha256_of(tensors, lambda _: "0" * 64)
    assert len(json.loads((tmp_path / HASHES_NAME).read_bytes())) == 256
