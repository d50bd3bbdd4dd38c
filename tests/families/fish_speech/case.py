"""Fish Speech in the shared tests."""

import math

from tests.families.cases import Case, codes, read_by, talker
from vllm_tts_cache.families.fish_speech.family import CODEC, FAMILY, IN_CONTEXT


def num_frames(num_samples, rate_hz):
    return math.ceil(math.ceil(num_samples * 44_100 / rate_hz) / 2_048)


CASE = Case(
    family=FAMILY,
    stage=talker("fish_speech_slow_ar", "FishSpeechSlowARForConditionalGeneration"),
    hf_config=read_by(
        "vllm_omni.model_executor.models.fish_speech"
        ".configuration_fish_speech:FishSpeechConfig"
    ),
    mode_of=lambda _info: IN_CONTEXT,
    weights=("codec.pth",),
    arrays={CODEC: codes(num_frames, 10)},
    control_tokens=("<|im_end|>", "<|audio_start|>"),
    message_max_bytes=8192,
    message_bytes_per_second=5 * 21.6,  # a real token id for each frame
    short_of_kv={
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 128,
        "max_model_len": 1024,
        "num_gpu_blocks_override": 72,  # of 32 tokens: three requests and a bit
    },
    does=frozenset({"waits_for_kv", "shares_kv"}),
)
