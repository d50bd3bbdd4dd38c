"""What the voices routes are sent: forms, and the body of a PATCH."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import datetime, timezone
from typing import Annotated, Any

from fastapi import Form, UploadFile
from pydantic import BaseModel, ConfigDict, Field

from vllm_tts_cache.audio.decode import name_of, naming
from vllm_tts_cache.audio.limits import DEFAULT_LIMITS
from vllm_tts_cache.catalogue.records import (
    MAX_LABELS,
    SpeakerChanges,
    check_text,
    joined_transcript,
)
from vllm_tts_cache.entrypoints.speakers.registering import Upload
from vllm_tts_cache.errors import InvalidAudioError, InvalidSpeakerError

_MIB = 1024 * 1024
# What a form says of a voice is a line of JSON; a clip may be as large as it may.
_MAX_JSON_CHARS = 16_384


def upload_of_form(
    name: Annotated[str, Form(examples=["keeper"])],
    consent: Annotated[
        str,
        Form(
            description="required: what it rests on, or the id of a recording",
            examples=["signed 2026-11-01"],
        ),
    ] = "",
    speaker_description: Annotated[
        str | None, Form(description="free text", examples=["warm, unhurried"])
    ] = None,
    language: Annotated[
        str | None,
        Form(description="BCP 47 tag, such as `de` or `pt-BR`", examples=["pt-BR"]),
    ] = None,
    labels: Annotated[
        str | None,
        Form(description="a JSON object of texts", examples=['{"gender": "female"}']),
    ] = None,
    expires_at: Annotated[
        str | None,
        Form(
            description="when it is deleted: ISO 8601, or Unix seconds",
            examples=["2031-01-01T00:00:00Z"],
        ),
    ] = None,
    type: Annotated[
        str,
        Form(
            description="`audio_sample`; `prompt` is refused", examples=["audio_sample"]
        ),
    ] = "audio_sample",
) -> Upload:
    """Read the fields of a registration that do not depend on its clips.

    Raises: InvalidSpeakerError.
    """
    if type == "prompt":
        reason = (
            "this server makes no voices from descriptions. Register one from a clip "
            "(type 'audio_sample'); where the model can be told how to speak, say it "
            "with a request's instructions"
        )
        raise InvalidSpeakerError("type", reason)
    if type != "audio_sample":
        raise InvalidSpeakerError("type", f"{type!r:.40} is not 'audio_sample'")
    if not consent.strip():
        raise InvalidSpeakerError("consent", "it must not be empty")
    return Upload(
        name=name,
        consent=consent.strip(),
        description=(speaker_description or "").strip() or None,
        language=(language or "").strip() or None,
        labels=parse_labels(labels),
        expires_at=parse_time(expires_at),
    )


def transcript_of(ref_texts: Sequence[str], num_clips: int) -> str | None:
    """Return what is said in so many clips: ``ref_text`` once, or once for each.

    Raises: InvalidSpeakerError.
    """
    for text in ref_texts:  # before a text is looked through
        check_text("ref_text", text.strip())
    return joined_transcript(ref_texts, num_clips)


class VoiceChanges(BaseModel):
    """What a PATCH may say; what it leaves out stays, and null takes away."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"name": "Keeper", "labels": {"team": "news"}},
                {"ref_text": None, "expires_at": "2031-01-01T00:00:00Z"},
            ]
        },
    )

    name: str | None = None
    speaker_description: str | None = None
    language: str | None = None
    labels: dict[str, str] | None = None
    ref_text: str | None = None
    expires_at: str | float | None = Field(
        default=None, description="ISO 8601 with a zone, or Unix seconds"
    )

    def parsed(self) -> SpeakerChanges:
        """Return them as the catalogue takes them. Raises: InvalidSpeakerError."""
        given = {field: getattr(self, field) for field in self.model_fields_set}
        if "name" in given and given["name"] is None:
            raise InvalidSpeakerError("name", "a voice has one; give another, not null")
        if "speaker_description" in given:
            given["description"] = given.pop("speaker_description")
        for field in ("description", "ref_text", "language"):
            if field in given:
                given[field] = (given[field] or "").strip() or None
        if "expires_at" in given:
            given["expires_at"] = parse_time(given["expires_at"])
        return SpeakerChanges(given)


def parse_time(given: str | float | None) -> float | None:
    """Return Unix seconds; an ISO 8601 time without a zone is UTC.

    Raises: InvalidSpeakerError.
    """
    if given is None or given == "":
        return None
    try:
        return float(given)
    except ValueError:
        pass
    try:
        # Python 3.10 reads no Z.
        moment = datetime.fromisoformat(str(given).strip().replace("Z", "+00:00"))
    except ValueError as exc:
        reason = "it is neither ISO 8601, as 2031-01-01T00:00:00Z, nor Unix seconds"
        raise InvalidSpeakerError("expires_at", reason) from exc
    zone = moment.tzinfo or timezone.utc
    return moment.replace(tzinfo=zone).timestamp()


def parse_labels(text: str | None) -> dict[str, str]:
    """Parse a JSON object of texts. Raises: InvalidSpeakerError."""
    if not (text or "").strip():
        return {}
    labels = _parse_json("labels", text or "")
    if not isinstance(labels, dict) or not all(
        isinstance(value, str) for value in labels.values()
    ):
        reason = 'it must be a JSON object of texts, as {"gender": "female"}'
        raise InvalidSpeakerError("labels", reason)
    return labels


def parse_label_filters(filters: list[str]) -> dict[str, str]:
    """Parse ``key:value`` texts. Raises: InvalidSpeakerError."""
    if len(filters) > MAX_LABELS:
        reason = f"{len(filters)} are given, at most {MAX_LABELS} are allowed"
        raise InvalidSpeakerError("label", reason)
    pairs = [text.partition(":") for text in filters]
    if not all(key.strip() and separator for key, separator, _ in pairs):
        raise InvalidSpeakerError("label", "write it as key:value")
    labels = {key.strip(): value.strip() for key, _, value in pairs}
    if len(labels) < len(pairs):
        raise InvalidSpeakerError("label", "a key is given twice; no voice has both")
    return labels


def parse_embedding(text: str) -> tuple[float, ...]:
    """Parse a JSON list of numbers. Raises: InvalidSpeakerError."""
    field = "speaker_embedding"
    values = _parse_json(field, text, max_chars=None)
    if not isinstance(values, list) or not values:
        raise InvalidSpeakerError(field, "it must be a non-empty list of numbers")
    if not all(type(value) in (int, float) for value in values):
        raise InvalidSpeakerError(field, "it must contain only numbers")
    try:
        return tuple(map(float, values))
    except OverflowError as exc:
        raise InvalidSpeakerError(field, "a value is too large") from exc


def without_empty(files: Any) -> Any:
    """Leave out fields without a file, as FastAPI does where only one is taken."""
    return [file for file in files if file != ""] if files else files


async def read_clips(files: Sequence[UploadFile]) -> list[bytes]:
    """Return the bytes of a voice's clips.

    Raises: InvalidAudioError if one is too large.
    """
    read: list[bytes] = []
    for index, file in enumerate(files):
        with naming(name_of(index)) if len(files) > 1 else nullcontext():
            read.append(await read_clip(file))
    return read


async def read_clip(file: UploadFile) -> bytes:
    """Return an uploaded file's bytes. Raises: InvalidAudioError if it is too large."""
    # One byte more than allowed is enough to know.
    data = await file.read(DEFAULT_LIMITS.max_bytes + 1)
    if len(data) > DEFAULT_LIMITS.max_bytes:
        size = "" if file.size is None else f"it has {file.size / _MIB:.1f} MiB, "
        allowed = f"allowed are {DEFAULT_LIMITS.max_bytes / _MIB:.0f} MiB"
        raise InvalidAudioError(f"{size}{allowed}")
    return data


def _parse_json(field: str, text: str, max_chars: int | None = _MAX_JSON_CHARS) -> Any:
    if max_chars is not None and len(text) > max_chars:
        reason = f"it has {len(text)} characters, at most {max_chars} are allowed"
        raise InvalidSpeakerError(field, reason)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise InvalidSpeakerError(field, f"it is not JSON: {exc}") from exc
