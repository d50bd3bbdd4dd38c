"""CosyVoice3 in the shared tests."""

from functools import partial

import numpy as np
import yaml

from tests.families.cases import Case
from vllm_tts_cache.families.cosyvoice3.family import FAMILY, MEL, SPEAKER, TOKENS
from vllm_tts_cache.families.cosyvoice3.positions import num_mel_frames, num_tokens
from vllm_tts_cache.families.networks.prompts import mode_of_request

assert FAMILY.deploy_file is not None
DEPLOYED = yaml.safe_load(FAMILY.deploy_file.read_text())
OVERRIDES = DEPLOYED["stages"][0]["engine_extras"]["hf_overrides"]


def hf_config(_checkpoint):
    """The host's: it reads none of the checkpoint's, and is told the tiny sizes."""
    from vllm_omni.transformers_utils.configs.cosyvoice3 import CosyVoice3Config

    config = CosyVoice3Config()
    for name, value in OVERRIDES.items():
        setattr(config, name, value)
    return config


def size_of(audio):
    return audio.num_samples, audio.sample_rate_hz


COMMON = {
    "model_arch": "CosyVoice3Model",
    "dtype": "float32",
    "hf_overrides": OVERRIDES,
}
TALKER_STAGE = {"model_stage": "cosyvoice3_talker", "worker_type": "ar", **COMMON}
DECODER_STAGE = {
    "model_stage": "cosyvoice3_code2wav",
    "worker_type": "generation",
    **COMMON,
}
INSTRUCT = {"extra_params": {"clone_mode": "instruct"}}
MISSING = "instructions"  # said before a clip is looked at
NAMED = {"voice": "Ann", "extra_params": {"clone_mode": "zero_shot"}}

CASE = Case(
    family=FAMILY,
    stage=TALKER_STAGE,
    hf_config=hf_config,
    mode_of=partial(mode_of_request, FAMILY),
    loading={"enable_prefix_caching": False},
    weights=("speech_tokenizer_v3.onnx", "campplus.onnx"),
    arrays={
        TOKENS: lambda audio: {TOKENS: np.zeros(num_tokens(*size_of(audio)), np.int16)},
        MEL: lambda audio: {
            MEL: np.zeros((num_mel_frames(*size_of(audio)), 80), np.float32)
        },
        SPEAKER: lambda _audio: {SPEAKER: np.zeros(192, np.float32)},
    },
    control_tokens=("<|im_start|>", "<|endofsystem|>"),
    message_bytes_per_second=25.0,  # a placeholder for each speech token
    short_of_kv={"enable_chunked_prefill": True, "max_num_batched_tokens": 128},
    does=frozenset({"streams"}),
    refused=(
        (NAMED, "needs the transcript"),
        ({"voice": "Ann", **INSTRUCT}, MISSING),
        ({"ref_audio": "data:x", **INSTRUCT}, MISSING),
        ({"voice": "Ann", "instructions": " ", **INSTRUCT}, MISSING),
        ({"voice": "Ann", "max_new_tokens": 5_000}, "max_new_tokens"),
    ),
)
