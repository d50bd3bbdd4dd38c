"""The voices routes' forms and answers: stock's fields, and ours beside them."""

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from fastapi import Form, UploadFile

from vllm_tts_cache.audio.limits import DEFAULT_LIMITS, AudioWarning
from vllm_tts_cache.catalogue.record import SpeakerRecord
from vllm_tts_cache.entrypoints.uploads import Upload
from vllm_tts_cache.errors import InvalidAudioError, InvalidSpeakerError

# Of the records on one page: some milliseconds of the event loop.
PAGE_MAX_BYTES = 1024 * 1024
# What a record takes beside its texts.
_RECORD_BYTES = 512
_MIB = 1024 * 1024


def upload_of_form(
    name: Annotated[str, Form()],
    consent: Annotated[str, Form()],
    ref_text: Annotated[str | None, Form()] = None,
    speaker_description: Annotated[str | None, Form()] = None,
) -> Upload:
    """Read the fields of a registration.

    Raises: InvalidSpeakerError.
    """
    if not consent.strip():
        raise InvalidSpeakerError("consent", "it must not be empty")
    return Upload(
        name=name,
        consent=consent,
        ref_text=(ref_text or "").strip() or None,
        description=(speaker_description or "").strip() or None,
    )


async def read_clip(file: UploadFile) -> bytes:
    """Return an uploaded file's bytes.

    Raises: InvalidAudioError if it is too large.
    """
    # One byte more than allowed is enough to know.
    data = await file.read(DEFAULT_LIMITS.max_bytes + 1)
    if len(data) > DEFAULT_LIMITS.max_bytes:
        size = "" if file.size is None else f"it has {file.size / _MIB:.1f} MiB, "
        allowed = f"allowed are {DEFAULT_LIMITS.max_bytes / _MIB:.0f} MiB"
        raise InvalidAudioError(f"{size}{allowed}")
    return data


def parse_embedding(text: str) -> tuple[float, ...]:
    """Parse a JSON list of numbers.

    Raises: InvalidSpeakerError.
    """
    field = "speaker_embedding"
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise InvalidSpeakerError(field, f"it is not JSON: {exc}") from exc
    if not isinstance(values, list) or not values:
        raise InvalidSpeakerError(field, "it must be a non-empty list of numbers")
    if not all(type(value) in (int, float) for value in values):
        raise InvalidSpeakerError(field, "it must contain only numbers")
    try:
        return tuple(map(float, values))
    except OverflowError as exc:
        raise InvalidSpeakerError(field, "a value is no finite float32") from exc


def voice(record: SpeakerRecord) -> dict[str, Any]:
    """Show a voice as the list does: stock's fields first."""
    shown: dict[str, Any] = {
        "name": record.name,
        "consent": record.consent,
        "created_at": int(record.created_at),
        "file_size": record.file_size or 0,
        "mime_type": record.mime_type or "",
        "embedding_source": "audio" if record.audio_sha256 else "direct",
        "embedding_dim": record.embedding_dim,
    }
    if record.ref_text:
        shown["ref_text"] = record.ref_text
    if record.description:
        shown["speaker_description"] = record.description
    shown["generation"] = record.generation
    if record.audio_sha256:
        shown["audio_sha256"] = record.audio_sha256
        shown["sample_rate"] = record.sample_rate_hz
        shown["duration_seconds"] = round(record.seconds, 3)
    return shown


def warnings(found: Sequence[AudioWarning]) -> list[dict[str, str]]:
    """Show what is not an error but may be heard."""
    return [{"code": str(w.code), "message": w.message} for w in found]


def first_page(records: Iterable[SpeakerRecord]) -> list[SpeakerRecord]:
    """Return as many records as one answer may hold: at least one, if there is one."""
    page: list[SpeakerRecord] = []
    num_bytes = 0
    for record in records:
        num_bytes += _num_bytes(record)
        if page and num_bytes > PAGE_MAX_BYTES:
            break
        page.append(record)
    return page


def _num_bytes(record: SpeakerRecord) -> int:
    texts = record.name, record.consent, record.ref_text, record.description
    # An answer is UTF-8: a character takes up to four bytes.
    return _RECORD_BYTES + sum(len(text.encode()) for text in texts if text)
