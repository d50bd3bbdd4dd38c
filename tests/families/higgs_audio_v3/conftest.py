"""The tiny checkpoint of the family."""

import pytest

from vllm_tts_cache.families.higgs_audio_v3.family import FAMILY


@pytest.fixture(scope="session")
def higgs_audio_v3_checkpoint(tiny):
    """Do not write to it."""
    return tiny(FAMILY)
