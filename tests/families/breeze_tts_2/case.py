"""Breeze-TTS-2 in the shared tests."""

from tests.families.cases import Case
from vllm_tts_cache.families.breeze_tts_2.family import FAMILY, IN_CONTEXT


def hf_config(_checkpoint):
    from vllm_omni.model_executor.models.breeze_tts_2.configuration_breeze import (
        BreezeConfig,
    )

    return BreezeConfig()


CASE = Case(
    family=FAMILY,
    stage={
        "model_stage": "breeze_tts_2",
        "model_arch": "BreezeForConditionalGeneration",
        "worker_type": "ar",
    },
    hf_config=hf_config,
    mode_of=lambda _info: IN_CONTEXT,
)
