"""The voices routes' answers: stock's fields, and ours beside them."""

from collections.abc import Sequence
from typing import Any

from vllm_tts_cache.audio.levels import AudioWarning
from vllm_tts_cache.catalogue.record import SpeakerRecord


def voice(record: SpeakerRecord) -> dict[str, Any]:
    """A voice as the list shows it: stock's fields first."""
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
    """What is not an error but may be heard."""
    return [{"code": str(w.code), "message": w.message} for w in found]
