"""The tiny checkpoint of the family."""

import pytest

from vllm_tts_cache.families.qwen3_tts.family import FAMILY


@pytest.fixture(scope="session")
def qwen3_checkpoint(tiny):
    """Do not write to it."""
    return tiny(FAMILY)
