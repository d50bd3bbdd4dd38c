"""What a PATCH may change of a speaker."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from vllm_tts_cache.catalogue.details import (
    check_expiry,
    check_labels,
    check_language,
    labels_to_json,
)
from vllm_tts_cache.catalogue.names import clean_new, fold
from vllm_tts_cache.catalogue.record import SpeakerRecord, check_text
from vllm_tts_cache.catalogue.transcripts import of_clips
from vllm_tts_cache.errors import InvalidSpeakerError

_CHECKS: dict[str, Callable[[Any], object]] = {
    "name": clean_new,
    "language": check_language,
    "labels": lambda labels: check_labels(labels or {}),
    "expires_at": check_expiry,
    "description": partial(check_text, "description"),
    "ref_text": partial(check_text, "ref_text"),
}


@dataclass(frozen=True, slots=True)
class SpeakerChanges:
    """New values of what is named, and of nothing else.

    Attributes:
        given: ``name``, ``description``, ``language``, ``labels``, ``ref_text``,
            ``is_pinned``, ``expires_at`` -> the new value, None to have none.

    Raises:
        InvalidSpeakerError: A value cannot be.
    """

    given: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not self.given:
            raise InvalidSpeakerError("body", "it changes nothing")
        for field, check in _CHECKS.items():
            if field in self.given:
                check(self.given[field])

    def applied_to(self, record: SpeakerRecord) -> SpeakerRecord:
        """What the record is afterwards.

        Raises: InvalidSpeakerError: A transcript of what is no audio, or one that has
            not a line for each clip.
        """
        if self.given.get("ref_text") and record.audio_sha256 is None:
            reason = "the voice is an embedding, in which nothing is said"
            raise InvalidSpeakerError("ref_text", reason)
        given: dict[str, Any] = {**self.given, "updated_at": time.time()}
        if "ref_text" in given:
            given["ref_text"] = of_clips(given["ref_text"], record.num_clips)
        if "name" in given:
            given["name"] = clean_new(given["name"])
            given["name_key"] = fold(given["name"])
        if "labels" in given:
            given["labels_json"] = labels_to_json(given.pop("labels") or {})
        return replace(record, **given)

    def columns(self, changed: SpeakerRecord) -> dict[str, Any]:
        """The columns that are new, of what `applied_to` returned."""
        names = {*self.given, "updated_at"}
        if "name" in names:
            names.add("name_key")
        if "labels" in names:
            names = names - {"labels"} | {"labels_json"}
        return {name: getattr(changed, name) for name in names}
