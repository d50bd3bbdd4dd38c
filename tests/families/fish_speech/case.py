"""Fish Speech in the shared tests."""

from tests.families.cases import Case
from vllm_tts_cache.families.fish_speech.family import FAMILY, IN_CONTEXT


def hf_config(checkpoint):
    from vllm_omni.model_executor.models.fish_speech.configuration_fish_speech import (
        FishSpeechConfig,
    )

    return FishSpeechConfig.from_pretrained(checkpoint)


CASE = Case(
    family=FAMILY,
    stage={
        "model_stage": "fish_speech_slow_ar",
        "model_arch": "FishSpeechSlowARForConditionalGeneration",
        "worker_type": "ar",
    },
    hf_config=hf_config,
    mode_of=lambda _info: IN_CONTEXT,
    official_test="test_encoders.py",
    message_max_bytes=8192,
    message_bytes_per_second=5 * 21.6,  # a real token id for each frame
    short_of_kv={
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 128,
        "max_model_len": 1024,
        "num_gpu_blocks_override": 72,  # of 32 tokens: three requests and a bit
    },
    does=frozenset({"waits_for_kv", "shares_kv", "codes_in_prompt"}),
)
