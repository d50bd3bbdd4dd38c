"""The identity of a reference encoder, whatever family it serves."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vllm_tts_cache.speaker.checkpoint import weights_sha256


def encoder_fingerprint(
    *,
    network: str,
    revision: int,
    resampler: str,
    weights: Mapping[str, Tensor],
    settings: Mapping[str, Any],
) -> str:
    """64 lowercase hex digits over everything that can change an encoding's bytes.

    But for the device, see `ReferenceEncoder.fingerprint`. The family is not in it:
    two that run one network on one checkpoint's weights share its encodings.

    Args:
        network: What runs and what comes out of it: "qwen3 12 hz codec". Networks of
            one name take the same settings and give the same arrays.
        revision: Raised with any change of ours that changes what it computes.
        resampler: What brings audio to its rate.
        weights: The tensors that it runs on, as the checkpoint has them, before any
            cast.
        settings: All that it reads of the checkpoint's config, its rates, and what it
            does otherwise than the host; JSON types.
    """
    identity = {
        "network": network,
        "revision": revision,
        "weights": weights_sha256(weights),
        "compute_dtype": "float32",
        "resampler": resampler,
        "settings": dict(settings),
    }
    return _sha256(identity)


def _sha256(identity: Mapping[str, Any]) -> str:
    canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
