"""CosyVoice3 in the shared tests."""

from tests.families.cases import Case
from vllm_tts_cache.families.cosyvoice3.family import FAMILY, MEL, TOKENS
from vllm_tts_cache.families.cosyvoice3.positions import num_mel_frames, num_tokens
from vllm_tts_cache.families.cosyvoice3.tiny.configs import host_overrides


def hf_config(_checkpoint):
    """The host's: it reads none of the checkpoint's, and is told the tiny sizes."""
    from vllm_omni.transformers_utils.configs.cosyvoice3 import CosyVoice3Config

    config = CosyVoice3Config()
    for name, value in host_overrides().items():
        setattr(config, name, value)
    return config


def mode_of(info):
    from vllm_tts_cache.families.cosyvoice3.prompt import mode_of_request

    return mode_of_request(info)


TALKER_STAGE = {
    "model_stage": "cosyvoice3_talker",
    "model_arch": "CosyVoice3Model",
    "worker_type": "ar",
    "dtype": "float32",
    "hf_overrides": host_overrides(),
}
DECODER_STAGE = {
    "model_stage": "cosyvoice3_code2wav",
    "model_arch": "CosyVoice3Model",
    "worker_type": "generation",
    "dtype": "float32",
    "hf_overrides": host_overrides(),
}

CASE = Case(
    family=FAMILY,
    stage=TALKER_STAGE,
    hf_config=hf_config,
    mode_of=mode_of,
    announced={TOKENS: num_tokens, MEL: num_mel_frames},
    message_bytes_per_second=25.0,  # a placeholder for each speech token
    short_of_kv={
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 128,
    },
    does=frozenset({"instructions"}),
)
