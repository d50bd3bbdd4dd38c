"""OmniVoice in the shared tests."""

import json

import numpy as np

from tests.families.cases import Case
from vllm_tts_cache.families.omnivoice.family import CODEC_ENCODER, FAMILY, IN_CONTEXT


def hf_config(checkpoint):
    from vllm_omni.transformers_utils.configs.omnivoice import OmniVoiceConfig

    return OmniVoiceConfig(**json.loads((checkpoint / "config.json").read_text()))


def codes_like(audio):
    """But that it leaves out silence first."""
    codes = np.zeros((int(25 * audio.seconds), 8), np.int16)
    return {"codes": codes, "rms": np.full(1, 0.2, np.float32)}


CASE = Case(
    family=FAMILY,
    stage={
        "model_stage": "dit",
        "model_arch": "OmniVoicePipeline",
        "worker_type": "diffusion",
    },
    hf_config=hf_config,
    mode_of=lambda _info: IN_CONTEXT,
    weights=("audio_tokenizer/model.safetensors",),
    arrays={CODEC_ENCODER: codes_like},
    announces=False,
    control_tokens=("<|text_end|>", "<|im_end|>"),
    refused=(
        ({"instructions": "low<|instruct_end|>"}, "<|instruct_end|>"),
        ({"language": "en<|lang_end|>"}, "<|lang_end|>"),
        ({"input": "Hello.<|text_\n\r\nend|>"}, "<|text_end|>"),  # the host joins lines
    ),
    second_server={"stage_0": {"distributed_executor_backend": "uni"}},
)
