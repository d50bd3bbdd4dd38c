"""The tiny checkpoint of the family."""

import pytest

from vllm_tts_cache.families.fish_speech.family import FAMILY


@pytest.fixture(scope="session")
def fish_speech_checkpoint(tiny):
    """Do not write to it."""
    return tiny(FAMILY)
