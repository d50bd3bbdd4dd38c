"""Audio8 TTS in the shared tests."""

from tests.families.cases import Case
from vllm_tts_cache.families.audio8_tts.family import FAMILY, IN_CONTEXT


def hf_config(_checkpoint):
    from vllm_omni.model_executor.models.audio8_tts.configuration_audio8_tts import (
        Audio8TTSConfig,
    )

    return Audio8TTSConfig()


CASE = Case(
    family=FAMILY,
    stage={
        "model_stage": "audio8_tts_slow_ar",
        "model_arch": "Audio8TTSSlowARForConditionalGeneration",
        "worker_type": "ar",
    },
    hf_config=hf_config,
    mode_of=lambda _info: IN_CONTEXT,
)
