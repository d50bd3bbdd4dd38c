"""Higgs Audio v3 in the shared tests."""

from tests.families.cases import Case, codes, read_by, talker
from vllm_tts_cache.families.higgs_audio_v3.family import CODEC, FAMILY, IN_CONTEXT
from vllm_tts_cache.families.networks.higgs_tokenizer.frames import num_clip_frames

CASE = Case(
    family=FAMILY,
    stage=talker("higgs_audio_v3", "HiggsAudioV3TalkerForConditionalGeneration"),
    hf_config=read_by(
        "vllm_omni.transformers_utils.configs.higgs_audio_v3:HiggsAudioV3Config"
    ),
    mode_of=lambda _info: IN_CONTEXT,
    weights=("model.safetensors",),
    arrays={CODEC: codes(num_clip_frames, 8)},
    control_tokens=("<|audio|>", "<|tts|>"),
    # A placeholder of one byte for each frame; longer numbers for how many they are.
    message_bytes_per_second=25.1,
    short_of_kv={
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 128,
        "max_model_len": 1024,
        "num_gpu_blocks_override": 72,  # of 32 tokens: two requests and a bit
    },
    does=frozenset({"waits_for_kv", "shares_kv"}),
)
