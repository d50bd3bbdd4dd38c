"""Where the tokenizer of Higgs Audio v2 is found, and whose encodings it shares."""

import pytest
import torch

from vllm_tts_cache.errors import CheckpointError
from vllm_tts_cache.families.higgs_audio_v2 import family
from vllm_tts_cache.families.higgs_audio_v2.encoders import load_reference_encoders
from vllm_tts_cache.families.higgs_audio_v3.encoders import (
    load_reference_encoders as load_those_of_v3,
)
from vllm_tts_cache.families.higgs_audio_v3.family import FAMILY as V3

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_elsewhere(monkeypatch, tmp_path):
    """No tokenizer on this machine but what a test puts there."""
    from huggingface_hub import constants

    for variable in family.TOKENIZER_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def bare(tmp_path):
    """A checkpoint as released: without a tokenizer."""
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "higgs_audio_v2"}')
    return folder


def test_it_is_found_in_the_checkpoint(own_checkpoint):
    found = family.tokenizer_folder(own_checkpoint)
    assert found == own_checkpoint / "audio_tokenizer"
    assert family.FAMILY.clones(own_checkpoint) is None


@pytest.mark.parametrize("variable", family.TOKENIZER_VARIABLES)
@pytest.mark.parametrize("part", ["", "audio_tokenizer"])
def test_found_where_a_variable_says(own_checkpoint, bare, monkeypatch, variable, part):
    monkeypatch.setenv(variable, str(own_checkpoint / part))
    assert family.tokenizer_folder(bare) == own_checkpoint / "audio_tokenizer"


def test_without_one_it_says_what_to_download(bare):
    assert family.tokenizer_folder(bare) is None
    reason = family.FAMILY.clones(bare)
    assert reason is not None and "k2-fsa/OmniVoice" in reason
    with pytest.raises(CheckpointError, match="Download audio_tokenizer/"):
        load_reference_encoders(bare, CPU)


def test_a_folder_of_something_else_is_none(bare):
    folder = bare / "audio_tokenizer"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "encodec"}')
    (folder / "model.safetensors").write_bytes(b"")
    assert family.tokenizer_folder(bare) is None


def test_both_families_have_one_encoding(own_checkpoint, tiny):
    """All that decides it is in its fingerprint."""
    one = load_reference_encoders(own_checkpoint, CPU)["codec"]
    other = load_those_of_v3(tiny(V3), CPU)["codec"]
    assert one.fingerprint == other.fingerprint
