"""VoxCPM2 in ``tests/families/heard.py``."""

from typing import Any

import numpy as np
import soundfile

from tests.families.heard import SPOKEN, TEXT
from vllm_tts_cache.families.voxcpm2.positions import SAMPLE_RATE_HZ as RATE_HZ

__all__ = ["RATE_HZ"]
TRANSCRIPTS = (None, SPOKEN)


def seed(params):
    params.seed = 7


def samples(output):
    found = output.outputs[0].multimodal_output
    audio = found.get("audio", found.get("model_outputs"))
    parts = audio if isinstance(audio, list) else [audio]
    return np.concatenate([part.reshape(-1).float().numpy() for part in parts])


def hosts_prompt(model, clip, ref_text):
    from transformers import AutoTokenizer
    from vllm_omni.model_executor.models.voxcpm2 import voxcpm2_talker as host
    from vllm_omni.transformers_utils.configs.voxcpm2 import VoxCPM2Config

    tokenizer = AutoTokenizer.from_pretrained(model)
    samples: Any = None
    rate_hz = None
    if clip is not None:
        samples, rate_hz = soundfile.read(clip)
    return host.build_voxcpm2_prompt(
        VoxCPM2Config.from_pretrained(model),
        tokenizer,
        host.build_cjk_split_map(tokenizer),
        TEXT,
        ref_audio=None if samples is None else samples.tolist(),
        ref_sr=rate_hz,
        ref_text=ref_text,
    )
