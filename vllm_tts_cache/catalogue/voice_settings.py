"""Settings that are kept with a voice: how it speaks where a request does not say."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vllm_tts_cache.errors import InvalidSpeakerError

_Word = Annotated[str, Meta(min_length=1, max_length=64)]


class VoiceSettings(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """All of a voice's settings; the names are those of a request's fields.

    Attributes:
        speed: Of whole answers; streams have no speed.
        temperature: Of sampling, as ``extra_params.temperature``.
        language: As the model names it.
        instructions: How it speaks, on models that can be told.
        seed: Makes equal requests sound alike.
        clone_mode: As ``extra_params.clone_mode``.
        gain_db: How much louder the speech is than the model makes it; it is cut off
            at full scale.
    """

    speed: Annotated[float, Meta(ge=0.25, le=4.0)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    language: _Word | None = None
    instructions: Annotated[str, Meta(min_length=1, max_length=2000)] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    clone_mode: _Word | None = None
    gain_db: Annotated[float, Meta(ge=-24.0, le=24.0)] | None = None


def checked(given: Any) -> dict[str, Any]:
    """Return what is kept of settings. Raises: InvalidSpeakerError."""
    try:
        kept = msgspec.to_builtins(msgspec.convert(given, VoiceSettings))
        msgspec.json.encode(kept)  # half a character has no bytes
        return kept
    except (msgspec.ValidationError, UnicodeError) as exc:
        raise InvalidSpeakerError("settings", str(exc)) from exc
