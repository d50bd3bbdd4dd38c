"""The pipeline of the tiny checkpoint, as a worker has it."""

import pytest

from tests.families.omnivoice.case import CASE
from tests.real_pipeline import loaded_pipeline
from vllm_tts_cache.families.omnivoice.worker import CachedOmniVoicePipeline


@pytest.fixture(scope="module")
def pipeline(own_checkpoint, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        samples = tmp_path_factory.mktemp("pipeline") / "samples"
        patch.setenv("SPEAKER_SAMPLES_DIR", str(samples))
        arch = CASE.stage["model_arch"]
        with loaded_pipeline(CachedOmniVoicePipeline, arch, own_checkpoint) as loaded:
            yield loaded
