"""The identity of a reference encoder, whatever its family."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vllm_tts_cache.speaker.checkpoint import weights_sha256


def encoder_fingerprint(
    *,
    family: str,
    encoder: str,
    revision: int,
    resampler: str,
    weights: Mapping[str, Tensor],
    settings: Mapping[str, Any],
) -> str:
    """64 lowercase hex digits over everything that can change an encoding's bytes.

    Args:
        family: The family's name.
        encoder: The encoder's name.
        revision: Raised with any change of ours that changes what it computes.
        resampler: What brings audio to its rate.
        weights: Its tensors as the checkpoint has them, before any cast.
        settings: Its part of the checkpoint's config, its rates, and what it does
            otherwise than the host; JSON types.
    """
    identity = {
        "family": family,
        "encoder": encoder,
        "revision": revision,
        "weights": weights_sha256(weights),
        "compute_dtype": "float32",
        "resampler": resampler,
        **settings,
    }
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
