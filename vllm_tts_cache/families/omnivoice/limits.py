"""Limits of requests to OmniVoice, which speaks whole texts, a batch of them at once.

The host has none: a long request holds up all others, and a parameter that is no number
fails its whole batch.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from vllm_omni.model_executor.models.omnivoice.duration import RuleDurationEstimator

from vllm_tts_cache.errors import InvalidSpeakerError

MAX_SECONDS = 300.0
MAX_STEPS = 128
MAX_FACTOR = 100.0  # far above any useful value
MAX_CHARS = 2000  # of each text field beside the input

_MAX_COUNTED_CHARS = 20_000  # a longer text is not worth counting
# The host's estimate for a request without a voice's own pace.
_PACE_TEXT, _PACE_FRAMES, _FRAMES_PER_SECOND = "Nice to meet you.", 25, 25

_Factor = Annotated[float, Meta(ge=0, le=MAX_FACTOR)]


class _Params(msgspec.Struct):
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    num_inference_steps: Annotated[int, Meta(ge=1, le=MAX_STEPS)] | None = None
    guidance_scale: _Factor | None = None
    # The model uses neither; the host's scheduler reads both for every model.
    flow_shift: _Factor | None = None
    sample_solver: Annotated[str, Meta(max_length=64)] | None = None


def check_request(request: Any) -> None:
    """Refuse a request that would hold up or fail its batch.

    Raises: InvalidSpeakerError.
    """
    for field in ("language", "instructions", "ref_text"):
        if (length := len(getattr(request, field) or "")) > MAX_CHARS:
            reason = f"it has {length} characters, at most {MAX_CHARS} are allowed"
            raise InvalidSpeakerError(field, reason)
    if spoken_seconds(request.input) > MAX_SECONDS:
        reason = f"it takes more than {MAX_SECONDS:g} s to speak; send it in parts"
        raise InvalidSpeakerError("input", reason)
    try:
        msgspec.convert(request.extra_params or {}, _Params)
    except msgspec.ValidationError as exc:
        raise InvalidSpeakerError("extra_params", str(exc)) from exc


def spoken_seconds(text: str) -> float:
    """Return the host's estimate of a text's duration; infinite for a long text."""
    if len(text) > _MAX_COUNTED_CHARS:
        return float("inf")
    estimate = RuleDurationEstimator().estimate_duration
    return estimate(text, _PACE_TEXT, _PACE_FRAMES) / _FRAMES_PER_SECOND
