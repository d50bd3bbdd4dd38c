"""Parses what clients send to the voices routes: paths, forms, the body of a PATCH."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import Form, Header, Path, Request, UploadFile
from pydantic import BaseModel, ConfigDict, Field

from vllm_tts_cache.audio.decode import CLIP_MAX_BYTES, AudioWarning, name_of, naming
from vllm_tts_cache.catalogue import records
from vllm_tts_cache.entrypoints.http.models import CONSENT_ID, VOICE_ID
from vllm_tts_cache.entrypoints.speakers.registering import Upload
from vllm_tts_cache.errors import InvalidAudioError, InvalidSpeakerError

VoiceName = Annotated[
    str, Path(description="its name, an alias or its id", examples=["keeper", VOICE_ID])
]
ConsentId = Annotated[str, Path(description="its id", examples=[CONSENT_ID])]
# The key of a request that its client sends again if the answer is lost.
RepeatedKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern="^[!-~]{1,200}$",
        description="new for each request, and the same whenever that one is repeated: "
        "it is done once, and each time answered as the first time",
        examples=["6f1c0c3e-7d0f-4a52-9a0b-0a4b1d9be0a7"],
    ),
]

_MIB = 1024 * 1024
# The limit of a form's field in JSON, such as labels; embeddings have another one.
_MAX_JSON_CHARS = 16_384
_MAX_UNKNOWN = 8


async def upload_of_form(
    name: Annotated[str, Form(examples=["keeper"])],
    consent: Annotated[
        str,
        Form(
            description="required: a reference to the consent, or a recording's id",
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
    aliases: Annotated[
        str | None, Form(description="other names: a JSON list", examples=['["alloy"]'])
    ] = None,
    settings: Annotated[
        str | None,
        Form(
            description="how it speaks where a request does not say: a JSON object",
            examples=['{"speed": 0.9, "gain_db": 3}'],
        ),
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
    idempotency_key: RepeatedKey = None,
) -> Upload:
    """Read the fields that do not depend on clips. Raises: InvalidSpeakerError."""
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
        reason = "it is empty; say in it where the speaker's consent can be found"
        raise InvalidSpeakerError("consent", reason)
    extras = {"aliases": aliases, "settings": settings}
    return Upload(
        name=name,
        consent=consent.strip(),
        description=(speaker_description or "").strip() or None,
        language=(language or "").strip() or None,
        labels=parse_labels(labels),
        extras={n: _parse_json(n, text) for n, text in extras.items() if text},
        expires_at=parse_time(expires_at),
        idempotency_key=idempotency_key,
    )


def of_unknown(form: Mapping[str, Any], request: Request) -> Iterator[AudioWarning]:
    """Warn of fields that the route does not know; stock leaves them out in silence."""
    known = {field.alias for field in request.scope["route"].fields}
    for name in sorted(form.keys() - known)[:_MAX_UNKNOWN]:
        text = f"The form's field {name!r:.60} is not known here, and was left out."
        yield AudioWarning("unknown_field", text)


def transcript_of(ref_texts: Sequence[str], num_clips: int) -> str | None:
    """Return the transcript of so many clips: ``ref_text`` is sent once, or for each.

    Raises: InvalidSpeakerError.
    """
    for text in ref_texts:  # refuses a long text before it is split into lines
        records.check_text("ref_text", text.strip())
    return records.joined_transcript(ref_texts, num_clips)


class VoiceChanges(BaseModel):
    """Fields that a PATCH changes; one that is left out stays, null removes it."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"name": "Keeper", "labels": {"team": "news"}, "aliases": ["alloy"]},
                {"ref_text": None, "expires_at": "2031-01-01T00:00:00Z"},
            ]
        },
    )

    name: str | None = None
    speaker_description: str | None = None
    language: str | None = None
    labels: dict[str, str] | None = None
    aliases: list[str] | None = None
    settings: dict[str, Any] | None = None
    ref_text: str | None = None
    expires_at: str | float | None = Field(
        default=None, description="ISO 8601 with a zone, or Unix seconds"
    )

    def parsed(self) -> records.SpeakerChanges:
        """Return the changes for the catalogue. Raises: InvalidSpeakerError."""
        given = {field: getattr(self, field) for field in self.model_fields_set}
        if "name" in given and given["name"] is None:
            raise InvalidSpeakerError("name", "it is null; send another name")
        if "speaker_description" in given:
            given["description"] = given.pop("speaker_description")
        for field in ("description", "ref_text", "language"):
            if field in given:
                given[field] = (given[field] or "").strip() or None
        if "expires_at" in given:
            given["expires_at"] = parse_time(given["expires_at"])
        return records.SpeakerChanges(given)


def parse_time(given: str | float | None) -> float | None:
    """Return Unix seconds; UTC where no zone is given. Raises: InvalidSpeakerError."""
    if given is None or given == "":
        return None
    with suppress(ValueError):
        return float(given)
    try:
        moment = datetime.fromisoformat(str(given).strip())
    except ValueError as exc:
        reason = "it is neither ISO 8601, as 2031-01-01T00:00:00Z, nor Unix seconds"
        raise InvalidSpeakerError("expires_at", reason) from exc
    return moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()


def parse_labels(text: str | None) -> dict[str, str]:
    """Parse a JSON object of texts. Raises: InvalidSpeakerError."""
    labels = parse_object("labels", text)
    if not all(isinstance(text, str) for text in labels.values()):
        reason = 'it must be a JSON object of texts, as {"gender": "female"}'
        raise InvalidSpeakerError("labels", reason)
    return labels


def parse_object(field: str, text: str | None) -> dict[str, Any]:
    """Parse a JSON object, {} of no text. Raises: InvalidSpeakerError."""
    if not (text or "").strip():
        return {}
    parsed = _parse_json(field, text or "")
    if not isinstance(parsed, dict):
        raise InvalidSpeakerError(field, "it must be a JSON object")
    return parsed


def parse_label_filters(filters: list[str]) -> dict[str, str]:
    """Parse ``key:value`` texts. Raises: InvalidSpeakerError."""
    if len(filters) > records.MAX_LABELS:
        reason = f"{len(filters)} are given, at most {records.MAX_LABELS} are allowed"
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
    """Return the clips' bytes. Raises: InvalidAudioError if one is too large."""
    read: list[bytes] = []
    for index, file in enumerate(files):
        with naming(name_of(index)) if len(files) > 1 else nullcontext():
            read.append(await read_clip(file))
    return read


async def read_clip(file: UploadFile) -> bytes:
    """Return an uploaded file's bytes. Raises: InvalidAudioError if it is too large."""
    # One byte more than allowed shows that the file is too large.
    data = await file.read(CLIP_MAX_BYTES + 1)
    if len(data) > CLIP_MAX_BYTES:
        size = "" if file.size is None else f"it has {file.size / _MIB:.1f} MiB, "
        allowed = f"allowed are {CLIP_MAX_BYTES / _MIB:.0f} MiB"
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
