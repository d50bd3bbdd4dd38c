"""The tiny checkpoint of the family."""

import pytest

from vllm_tts_cache.families.cosyvoice3.family import FAMILY


@pytest.fixture(scope="session")
def cosyvoice3_checkpoint(tiny):
    """Do not write to it."""
    return tiny(FAMILY)
