"""VoxCPM2 in the shared tests."""

from tests.families.cases import Case
from vllm_tts_cache.families.voxcpm2.family import FAMILY
from vllm_tts_cache.families.voxcpm2.positions import num_positions


def hf_config(checkpoint):
    from vllm_omni.transformers_utils.configs.voxcpm2 import VoxCPM2Config

    return VoxCPM2Config.from_pretrained(checkpoint)


def mode_of(info):
    from vllm_tts_cache.families.voxcpm2.prompt import mode_of_request

    return mode_of_request(info)


CASE = Case(
    family=FAMILY,
    stage={
        "model_stage": "latent_generator",
        "model_arch": "VoxCPM2TalkerForConditionalGeneration",
        "worker_type": "ar",
    },
    hf_config=hf_config,
    mode_of=mode_of,
    announced=dict.fromkeys(FAMILY.encoders, num_positions),
    message_bytes_per_second=6.25,  # a placeholder for each position
    short_of_kv={
        "async_scheduling": True,
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 128,
        "max_model_len": 512,
        "num_gpu_blocks_override": 24,  # of 32 tokens: three requests and a bit
    },
    does=frozenset({"continuation", "waits_for_kv"}),
)
