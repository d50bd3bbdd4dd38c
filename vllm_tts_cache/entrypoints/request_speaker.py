"""Which speaker a speech request names, and which way it clones."""

from collections.abc import Container
from typing import Any

from vllm_tts_cache.errors import InvalidAudioError, InvalidSpeakerError
from vllm_tts_cache.speaker.family import CloneMode, Family

# What OpenAI clients send where the host wants no voice at all.
PLACEHOLDER = "default"


def drop_what_is_ignored(request: Any, presets: Container[str]) -> None:
    """Take the voice away from a request that does not mean it.

    A raw embedding is the speaker, whatever else is named; and the placeholder is
    nobody, unless the checkpoint has a speaker of that name.
    """
    if request.speaker_embedding is not None:
        request.voice = request.ref_audio = None
    elif _is_placeholder(request.voice) and PLACEHOLDER not in presets:
        request.voice = None


def names_speaker(request: Any, presets: Container[str]) -> bool:
    """Tell whether reference audio or a registered voice is to speak."""
    if request.ref_audio is not None:
        return True
    return request.voice is not None and request.voice.strip().lower() not in presets


def single_url(ref_audio: Any) -> str:
    """Return the one URL of a request's ``ref_audio``.

    Raises: InvalidAudioError if there is not exactly one.
    """
    urls = ref_audio if isinstance(ref_audio, list) else [ref_audio]
    if len(urls) != 1 or not isinstance(urls[0], str):
        raise InvalidAudioError("give one URL (http, https, file or data)")
    return urls[0]


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


def as_clone(request: Any, mode: CloneMode, *, stored_ref_text: str | None) -> Any:
    """Return a copy that names no speaker, as the host's adapters take a clone."""
    in_context = mode is CloneMode.IN_CONTEXT
    changed = {
        "voice": None,
        "task_type": "Base",
        "ref_audio": None,
        "ref_text": _ref_text(request, stored_ref_text) if in_context else None,
        "x_vector_only_mode": not in_context,
    }
    return request.model_copy(update=changed)


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


def _is_placeholder(voice: str | None) -> bool:
    return voice is not None and voice.strip().lower() == PLACEHOLDER


def _ref_text(request: Any, stored: str | None) -> str:
    given = request.ref_text or ""
    return given if given.strip() else stored or ""
