"""What people write beside a voice: its language, labels and end; and their limits."""

import json
import math
import re
from collections.abc import Mapping

from vllm_tts_cache.catalogue.names import fold, is_storable
from vllm_tts_cache.errors import InvalidSpeakerError

MAX_LABELS = 20
MAX_LABEL_KEY_CHARS = 64
MAX_LABEL_VALUE_CHARS = 128
_MAX_LANGUAGE_CHARS = 35  # what RFC 5646 asks a program to make room for
_LANGUAGE = re.compile(r"[A-Za-z]{2,8}(-[A-Za-z0-9]{1,8})*")
# The first moment of the year 10000, which no date has room for.
_END_OF_TIME = 253_402_300_800.0


def check_language(language: str | None) -> None:
    """Refuse what is no BCP 47 tag, as ``de`` or ``pt-BR``; None passes.

    Raises: InvalidSpeakerError.
    """
    if language is None:
        return
    if len(language) > _MAX_LANGUAGE_CHARS or not _LANGUAGE.fullmatch(language):
        reason = f"it is no language tag of at most {_MAX_LANGUAGE_CHARS} characters"
        raise InvalidSpeakerError("language", f"{reason}, such as 'de' or 'pt-BR'")


def check_labels(labels: Mapping[str, str]) -> None:
    """Refuse too many labels, long ones, and two whose keys are one when folded.

    Raises: InvalidSpeakerError.
    """
    if len(labels) > MAX_LABELS:
        reason = f"{len(labels)} are given, at most {MAX_LABELS} are allowed"
        raise InvalidSpeakerError("labels", reason)
    for key, value in labels.items():
        _check_label("the key", key, MAX_LABEL_KEY_CHARS)
        _check_label(f"the value of {key!r}", value, MAX_LABEL_VALUE_CHARS)
    if len({fold(key) for key in labels}) < len(labels):
        raise InvalidSpeakerError("labels", "two keys differ in case only")


def check_expiry(expires_at: float | None) -> None:
    """Refuse an end that is no time; None is no end.

    Raises: InvalidSpeakerError.
    """
    if expires_at is None:
        return
    if not math.isfinite(expires_at) or expires_at >= _END_OF_TIME:
        raise InvalidSpeakerError("expires_at", "it is no time before the year 10000")


def check_is_to_come(expires_at: float | None, now: float) -> None:
    """Refuse an end that is past, by the catalogue's clock; None is no end.

    Raises: InvalidSpeakerError.
    """
    if expires_at is not None and expires_at <= now:
        reason = "it is in the past; to remove the voice now, DELETE it"
        raise InvalidSpeakerError("expires_at", reason)


def labels_to_json(labels: Mapping[str, str]) -> str | None:
    """Labels as the catalogue keeps them: None for none."""
    return json.dumps(dict(labels), ensure_ascii=False) if labels else None


def labels_of_json(stored: str | None) -> dict[str, str]:
    """The inverse of `labels_to_json`."""
    return json.loads(stored) if stored else {}


def _check_label(what: str, text: str, max_chars: int) -> None:
    if not text.strip() or len(text) > max_chars:
        reason = f"{what} must have 1 to {max_chars} characters"
        raise InvalidSpeakerError("labels", reason)
    if not is_storable(text) or not text.isprintable():
        raise InvalidSpeakerError("labels", f"{what} holds what is no printable text")
