"""What people write beside a voice: language, labels, end, transcripts; their limits.

The transcript of several clips has a line for each, in their order.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence

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


def lines_of(ref_text: str) -> list[str]:
    """Return its lines, without white space around them, and those that say something.

    Only what ends a line in every editor does so here.
    """
    unified = ref_text.replace("\r\n", "\n").replace("\r", "\n")
    return [line for each in unified.split("\n") if (line := each.strip())]


def of_clips(ref_text: str | None, num_clips: int) -> str | None:
    """Return the transcript of so many clips; that of one stays as it was written.

    Raises: InvalidSpeakerError if there are not as many lines as clips.
    """
    if ref_text is None or num_clips == 1:
        return ref_text
    lines = lines_of(ref_text)
    if len(lines) == num_clips:
        return "\n".join(lines)
    if not lines:
        return None
    reason = (
        f"it has {_counted(len(lines), 'line')}, and the voice {num_clips} clips; "
        "write one line for each clip, in their order"
    )
    raise InvalidSpeakerError("ref_text", reason)


def joined(ref_texts: Sequence[str], num_clips: int) -> str | None:
    """Return the one transcript of a form that gives it once, or once for each clip.

    Raises: InvalidSpeakerError if it is given another number of times.
    """
    given = [text.strip() for text in ref_texts]
    if not any(given):
        return None
    if len(given) == 1:
        return of_clips(given[0], num_clips)
    if len(given) != num_clips:
        there = "is 1 clip" if num_clips == 1 else f"are {num_clips} clips"
        reason = f"it is given {len(given)} times, and there {there}; give it once"
        reason += " for each, or once with a line for each"
        raise InvalidSpeakerError("ref_text", reason)
    return of_clips("\n".join(" ".join(lines_of(text)) for text in given), num_clips)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
