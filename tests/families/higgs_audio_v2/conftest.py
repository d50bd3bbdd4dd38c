"""Tiny checkpoints of the family; the host's classes run on them, no server does."""

import pytest

from tests.families.higgs_audio_v2.tiny_checkpoint import (
    write_higgs_audio_v2_checkpoint,
)


@pytest.fixture(scope="session")
def higgs_audio_v2_checkpoint(tmp_path_factory):
    """Do not write to it."""
    folder = tmp_path_factory.mktemp("higgs-audio-v2")
    return write_higgs_audio_v2_checkpoint(folder / "checkpoint")
