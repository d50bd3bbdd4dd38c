"""Identifiers that clients keep: random, and never given to something else."""

import re
import secrets

VOICE_PREFIX = "voice_"
CONSENT_PREFIX = "cons_"

_NUM_BYTES = 16  # as many as a UUID: nobody guesses one, no two are equal
_ID = re.compile(f"({VOICE_PREFIX}|{CONSENT_PREFIX})[0-9a-f]{{{2 * _NUM_BYTES}}}")


def new_voice_id() -> str:
    """``voice_`` and 32 hex digits."""
    return f"{VOICE_PREFIX}{secrets.token_hex(_NUM_BYTES)}"


def new_consent_id() -> str:
    """``cons_`` and 32 hex digits."""
    return f"{CONSENT_PREFIX}{secrets.token_hex(_NUM_BYTES)}"


def is_voice_id(text: str) -> bool:
    """Whether the text has the form of a voice's id."""
    return text.startswith(VOICE_PREFIX) and _ID.fullmatch(text) is not None


def is_consent_id(text: str) -> bool:
    """Whether the text has the form of a consent recording's id."""
    return text.startswith(CONSENT_PREFIX) and _ID.fullmatch(text) is not None
