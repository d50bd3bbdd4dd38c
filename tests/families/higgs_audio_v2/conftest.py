"""Tiny checkpoints of the family; the host's classes run on them, no server does."""

import pytest

from tests.families.higgs_audio_v2.case import CASE
from tests.families.higgs_audio_v2.tiny_checkpoint import (
    write_higgs_audio_v2_checkpoint,
)
from tests.real_talker import loaded_talker


@pytest.fixture(scope="session")
def higgs_audio_v2_checkpoint(tmp_path_factory):
    """Do not write to it."""
    folder = tmp_path_factory.mktemp("higgs-audio-v2")
    return write_higgs_audio_v2_checkpoint(folder / "checkpoint")


@pytest.fixture(scope="module")
def talker(higgs_audio_v2_checkpoint, tmp_path_factory):
    """As a worker has it; what its requests leave behind is a test's to tidy."""
    directory = tmp_path_factory.mktemp("talker")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEAKER_SAMPLES_DIR", str(directory / "samples"))
        with loaded_talker(
            CASE, higgs_audio_v2_checkpoint, directory, async_chunk=False
        ) as model:
            yield model
