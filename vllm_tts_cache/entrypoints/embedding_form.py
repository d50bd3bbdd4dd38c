"""A raw speaker embedding as a form field."""

import json
from typing import TYPE_CHECKING

from vllm_tts_cache.entrypoints.clone_request import refuse_embedding
from vllm_tts_cache.errors import InvalidSpeakerError

if TYPE_CHECKING:
    from vllm_tts_cache.entrypoints.serving import CachedServingSpeech

FIELD = "speaker_embedding"


def parse_embedding(text: str, handler: "CachedServingSpeech") -> tuple[float, ...]:
    """Parse a JSON list of numbers of the dimension that the model needs.

    Raises: InvalidSpeakerError.
    """
    if (family := handler.served_family) is not None:
        refuse_embedding(family, FIELD)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise InvalidSpeakerError(FIELD, f"it is not JSON: {exc}") from exc
    if not isinstance(values, list) or not values:
        raise InvalidSpeakerError(FIELD, "it must be a non-empty list of numbers")
    if not all(type(value) in (int, float) for value in values):
        raise InvalidSpeakerError(FIELD, "it must contain only numbers")
    adapter = handler._get_tts_adapter()
    if adapter is not None:
        problem = adapter.validate_tts_embedding_dim(len(values))
        if problem is not None:
            raise InvalidSpeakerError(FIELD, problem)
    try:
        return tuple(map(float, values))
    except OverflowError as exc:
        raise InvalidSpeakerError(FIELD, "a value is no finite float32") from exc
