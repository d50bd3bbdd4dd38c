"""The identity of a Qwen3-TTS reference encoder."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vllm_tts_cache.families.qwen3_tts.family import FAMILY
from vllm_tts_cache.families.qwen3_tts.resample import RESAMPLER
from vllm_tts_cache.speaker.fingerprint import encoder_fingerprint

# Raise it with any change here that changes what an encoder computes.
REVISION = 1


def fingerprint(
    encoder: str, weights: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> str:
    """64 lowercase hex digits over everything that can change an encoding's bytes.

    Args:
        encoder: The encoder's name.
        weights: Its tensors as the checkpoint has them, before any cast.
        settings: Its part of the checkpoint's config, its rates, and what it does
            otherwise than the host; JSON types.
    """
    return encoder_fingerprint(
        family=FAMILY.name,
        encoder=encoder,
        revision=REVISION,
        resampler=RESAMPLER,
        weights=weights,
        settings=settings,
    )
