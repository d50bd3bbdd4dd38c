"""The tiny checkpoint of the family."""

import pytest

from vllm_tts_cache.families.voxcpm2.family import FAMILY


@pytest.fixture(scope="session")
def voxcpm2_checkpoint(tiny):
    """Do not write to it."""
    return tiny(FAMILY)
