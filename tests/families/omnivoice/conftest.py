"""The tiny checkpoint of the family."""

import pytest

from vllm_tts_cache.families.omnivoice.family import FAMILY


@pytest.fixture(scope="session")
def omnivoice_checkpoint(tiny):
    """Do not write to it."""
    return tiny(FAMILY)
