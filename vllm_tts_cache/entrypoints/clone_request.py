"""Which way a request clones, and the request that the host gets to see."""

from typing import Any

from vllm_tts_cache.entrypoints.request_speaker import RequestSpeaker
from vllm_tts_cache.entrypoints.resolve import Clip
from vllm_tts_cache.errors import InvalidSpeakerError
from vllm_tts_cache.speaker.family import CloneMode, Family

# What the host's validation accepts as inline audio; nothing is ever read from it.
_ELSEWHERE = "data:,"


def clone_mode(
    family: Family, request: Any, *, stored_ref_text: str | None, inline: bool
) -> CloneMode:
    """Return the mode: a transcript, stored or given, asks for an in-context clone.

    The request may say otherwise. Inline audio without a transcript is refused unless
    it says x-vector, and always by a family that clones in context only.

    Raises: InvalidSpeakerError.
    """
    has_transcript = bool(_ref_text(request, stored_ref_text).strip())
    x_vector = request.x_vector_only_mode
    if not family.clones_from_embeddings:
        return _in_context_only(family, has_transcript, x_vector)
    if x_vector is None:
        x_vector = not has_transcript and not inline
    if not x_vector and not has_transcript:
        reason = (
            "an in-context clone needs the transcript of the reference audio. Give "
            "ref_text, or set x_vector_only_mode"
        )
        raise InvalidSpeakerError("ref_text", reason)
    return CloneMode.of(in_context=not x_vector)


def as_clone(
    request: Any, clip: Clip, mode: CloneMode, *, stored_ref_text: str | None
) -> tuple[RequestSpeaker, Any]:
    """Put the host's stand-ins in place of the speaker."""
    in_context = mode is CloneMode.IN_CONTEXT
    changed = {
        "voice": None,
        "task_type": "Base",
        "ref_audio": _ELSEWHERE,
        "ref_text": _ref_text(request, stored_ref_text) if in_context else None,
        "x_vector_only_mode": not in_context,
    }
    speaker = RequestSpeaker(clip=clip, in_context=in_context)
    return speaker, request.model_copy(update=changed)


def refuse_embedding(family: Family, field: str) -> None:
    """Refuse a raw speaker embedding where the family cannot speak with one.

    Raises: InvalidSpeakerError.
    """
    if not family.clones_from_embeddings:
        reason = (
            f"{family.name} clones from reference audio, not from an embedding; "
            "register the voice with audio_sample and ref_text"
        )
        raise InvalidSpeakerError(field, reason)


def _in_context_only(
    family: Family, has_transcript: bool, x_vector: bool | None
) -> CloneMode:
    if x_vector:
        reason = f"{family.name} clones in context only; leave it out and give ref_text"
        raise InvalidSpeakerError("x_vector_only_mode", reason)
    if not has_transcript:
        reason = (
            "voice cloning requires 'ref_text', the transcript of the reference "
            "audio; give it, or register the voice with it"
        )
        raise InvalidSpeakerError("ref_text", reason)
    return CloneMode.IN_CONTEXT


def _ref_text(request: Any, stored: str | None) -> str:
    given = request.ref_text or ""
    return given if given.strip() else stored or ""
