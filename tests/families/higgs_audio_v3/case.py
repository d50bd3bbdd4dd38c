"""Higgs Audio v3 in the shared tests."""

from tests.families.cases import Case
from vllm_tts_cache.families.higgs_audio_v3.family import CODEC, FAMILY, IN_CONTEXT
from vllm_tts_cache.families.networks.higgs_tokenizer.frames import num_clip_frames


def hf_config(checkpoint):
    from vllm_omni.transformers_utils.configs.higgs_audio_v3 import HiggsAudioV3Config

    return HiggsAudioV3Config.from_pretrained(checkpoint)


CASE = Case(
    family=FAMILY,
    stage={
        "model_stage": "higgs_audio_v3",
        "model_arch": "HiggsAudioV3TalkerForConditionalGeneration",
        "worker_type": "ar",
    },
    hf_config=hf_config,
    mode_of=lambda _info: IN_CONTEXT,
    announced={CODEC: num_clip_frames},
    # A placeholder of one byte for each frame; longer numbers for how many they are.
    message_bytes_per_second=25.1,
    short_of_kv={
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 128,
        "max_model_len": 1024,
        "num_gpu_blocks_override": 72,  # of 32 tokens: two requests and a bit
    },
    does=frozenset({"waits_for_kv", "shares_kv", "rows_by_position"}),
)
