"""VoxCPM2 in the shared tests."""

from functools import partial

import numpy as np

from tests.families.cases import Case, read_by, talker
from vllm_tts_cache.families.networks.prompts import mode_of_request
from vllm_tts_cache.families.voxcpm2.family import FAMILY
from vllm_tts_cache.families.voxcpm2.positions import num_positions


def features_like(audio):
    number = num_positions(audio.num_samples, audio.sample_rate_hz)
    return {"features": np.zeros((number, 4, 64), np.float32)}


CONTINUED = {"voice": "Ann", "extra_params": {"clone_mode": "continuation"}}

CASE = Case(
    family=FAMILY,
    stage=talker("latent_generator", "VoxCPM2TalkerForConditionalGeneration"),
    hf_config=read_by("vllm_omni.transformers_utils.configs.voxcpm2:VoxCPM2Config"),
    mode_of=partial(mode_of_request, FAMILY),
    loading={"async_chunk": False, "enable_prefix_caching": False},
    weights=("audiovae.pth",),
    arrays=dict.fromkeys(FAMILY.encoders, features_like),
    control_tokens=("<s>", "<|audio_prompt_start|>"),
    refused=((CONTINUED, "needs the transcript"),),
    message_bytes_per_second=6.25,  # a placeholder for each position
    short_of_kv={
        "async_scheduling": True,
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 128,
        "max_model_len": 512,
        "num_gpu_blocks_override": 24,  # of 32 tokens: three requests and a bit
    },
    does=frozenset({"streams", "waits_for_kv"}),
)
