"""What a request says of sampling: the host hands it to the engine as it is.

There it is read in a step that everybody shares, so a word in the place of a number
would end the engine.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from vllm_tts_cache.errors import InvalidSpeakerError

_FIELD = "extra_params"


class _Numbers(msgspec.Struct, omit_defaults=True):
    """Those that the host's workers read, of whatever model."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    tts_local_seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    cfg_alpha: float | None = None


def check_sampling(extra_params: Mapping[str, Any] | None) -> None:
    """Refuse what the engine would not survive.

    Raises: InvalidSpeakerError.
    """
    if not extra_params:
        return
    try:
        given = msgspec.to_builtins(msgspec.convert(extra_params, _Numbers))
        for name, value in given.items():
            if not math.isfinite(value):
                raise ValueError(f"{name} is not finite")
        SamplingParams(
            **{k: v for k, v in given.items() if k in ("temperature", "top_p", "top_k")}
        )
    except (ValueError, VLLMValidationError) as exc:
        raise InvalidSpeakerError(
            _FIELD, f"{exc}; correct it, or leave it out"
        ) from exc
