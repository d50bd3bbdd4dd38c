"""The ways a family clones, and which one a request gets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vllm_tts_cache.errors import InvalidSpeakerError

if TYPE_CHECKING:
    from vllm_tts_cache.speaker.family import Family

# Where a request says which way it wants, in the host's `extra_params`.
CLONE_MODE = "clone_mode"
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Transcript(str, Enum):
    """What a mode does with the transcript of the reference audio."""

    REQUIRED = "required"
    USED = "used"  # if there is one
    UNUSED = "unused"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mode:
    """A way to clone.

    Attributes:
        name: As requests, docs and metrics spell it.
        encoders: Names of the reference encoders whose encodings it needs.
        transcript: What it does with one.
        takes_embedding: Whether a raw speaker embedding can stand for the encodings.
        stand_in: Fields of the request by which the host's own adapter knows it.
        example: Fields that a request of it needs beside the voice, with values.
    """

    name: str
    encoders: tuple[str, ...]
    transcript: Transcript
    takes_embedding: bool = False
    stand_in: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    example: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)


@dataclass(frozen=True, slots=True, kw_only=True)
class CloneFacts:
    """What decides how a request clones.

    Attributes:
        given_transcript: Whether the request has one.
        stored_transcript: Whether the voice was registered with one.
        is_inline: Whether the reference audio came with the request.
        named: The mode that the request names.
        x_vector_only: The host's field of that name; None if it was left out.
    """

    given_transcript: bool = False
    stored_transcript: bool = False
    is_inline: bool = False
    named: str | None = None
    x_vector_only: bool | None = None


def mode_of(family: "Family", facts: CloneFacts) -> Mode:
    """Choose a mode: what the request names, else what the transcript allows.

    Raises: InvalidSpeakerError that names the field to change.
    """
    mode = _named(family, facts) or _by_transcript(family, facts)
    has_transcript = facts.given_transcript or facts.stored_transcript
    if mode.transcript is Transcript.REQUIRED and not has_transcript:
        raise InvalidSpeakerError("ref_text", _no_transcript(family, mode))
    return mode


def possible_modes(family: "Family", *, has_transcript: bool) -> Sequence[Mode]:
    """Return the modes that a voice registered so needs nothing more for."""
    return [
        mode
        for mode in family.modes
        if has_transcript or mode.transcript is not Transcript.REQUIRED
    ]


def _named(family: "Family", facts: CloneFacts) -> Mode | None:
    if facts.named is not None:
        for mode in family.modes:
            if mode.name == facts.named:
                return mode
        known = ", ".join(mode.name for mode in family.modes)
        reason = f"{family.title} has no mode {facts.named!r:.60}; it has {known}"
        raise InvalidSpeakerError(f"extra_params.{CLONE_MODE}", reason)
    if not facts.x_vector_only:
        return None
    if family.embedding_mode is None:
        reason = f"{family.title} has no x-vectors to clone from; leave it out"
        raise InvalidSpeakerError("x_vector_only_mode", reason)
    return family.embedding_mode


def _by_transcript(family: "Family", facts: CloneFacts) -> Mode:
    counts = facts.stored_transcript and family.stored_transcript_selects
    modes = family.modes
    if facts.x_vector_only is False:  # said, and not left out
        modes = tuple(mode for mode in modes if not mode.takes_embedding)
    wanted = [mode for mode in modes if mode.transcript is not Transcript.UNUSED]
    if facts.given_transcript or counts:
        return (wanted or list(modes))[0]
    plain = [mode for mode in modes if mode.transcript is not Transcript.REQUIRED]
    if not plain or (facts.is_inline and family.asks_inline_transcript):
        return wanted[0]
    return plain[0]


def _no_transcript(family: "Family", mode: Mode) -> str:
    reason = (
        f"{family.title} needs the transcript of the reference audio for a clone "
        f"of mode {mode.name!r}. Give ref_text, or register the voice with it"
    )
    others = possible_modes(family, has_transcript=False)
    if others:
        reason += f"; {others[0].name!r} needs none"
        if others[0].takes_embedding:
            reason += " (set x_vector_only_mode)"
    return reason
