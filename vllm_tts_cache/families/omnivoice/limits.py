"""What a request may ask of a model that speaks a text whole, and its batch with it.

The host bounds none of it: nothing else is computed meanwhile, and what is no number
fails the batch.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from vllm_omni.model_executor.models.omnivoice.duration import RuleDurationEstimator

from vllm_tts_cache.errors import InvalidSpeakerError

MAX_SECONDS = 300.0
MAX_STEPS = 128
MAX_FACTOR = 100.0  # by far more than is of use
MAX_CHARS = 2000  # of what is put in beside the text

_MAX_COUNTED_CHARS = 20_000  # a longer text is not worth counting
# As the host estimates without a voice's own pace.
_PACE_TEXT, _PACE_FRAMES, _FRAMES_PER_SECOND = "Nice to meet you.", 25, 25


_Factor = Annotated[float, Meta(ge=0, le=MAX_FACTOR)]


class _Params(msgspec.Struct):
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    num_inference_steps: Annotated[int, Meta(ge=1, le=MAX_STEPS)] | None = None
    guidance_scale: _Factor | None = None
    # The model uses neither; the host's scheduler reads both, of every model's request.
    flow_shift: _Factor | None = None
    sample_solver: Annotated[str, Meta(max_length=64)] | None = None


def check_request(request: Any) -> None:
    """Refuse what would hold up or fail a batch.

    Raises: InvalidSpeakerError.
    """
    for field in ("language", "instructions", "ref_text"):
        if (length := len(getattr(request, field) or "")) > MAX_CHARS:
            reason = f"it has {length} characters, at most {MAX_CHARS} are allowed"
            raise InvalidSpeakerError(field, reason)
    if spoken_seconds(request.input) > MAX_SECONDS:
        reason = f"it takes more than {MAX_SECONDS:g} s to speak; send it in parts"
        raise InvalidSpeakerError("input", reason)
    _check_params(request.extra_params or {})


def spoken_seconds(text: str) -> float:
    """About how long the text takes, by the host's own estimate."""
    if len(text) > _MAX_COUNTED_CHARS:
        return float("inf")
    estimate = RuleDurationEstimator().estimate_duration
    return estimate(text, _PACE_TEXT, _PACE_FRAMES) / _FRAMES_PER_SECOND


def _check_params(params: Mapping[str, Any]) -> None:
    try:
        msgspec.convert(params, _Params)
    except msgspec.ValidationError as exc:
        raise InvalidSpeakerError("extra_params", str(exc)) from exc
