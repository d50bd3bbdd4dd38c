"""The speaker that a speech request names, its mode, and its cache outcome.

The host hands a request's sampling options to the engine unchecked, where a step of all
requests reads them: a word in the place of a number would end the engine.
"""

import dataclasses
import math
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from vllm_tts_cache.catalogue.names import PLACEHOLDER
from vllm_tts_cache.catalogue.records import SpeakerRecord
from vllm_tts_cache.entrypoints.http.limits import check_scheme
from vllm_tts_cache.errors import InvalidAudioError, InvalidSpeakerError, TTSCacheError
from vllm_tts_cache.speaker.family import (
    CLONE_MODE,
    CloneFacts,
    Family,
    Mode,
    Transcript,
)

_VOICE_FIELDS = ("voice", "speaker")  # `speaker` is the host's second name for `voice`
# The host removes the placeholder from some requests before they are seen here.
MISSING_VOICE = (
    "Invalid voice: the request names none ('default' and '' are none), and this model "
    "has no voice of its own. Send the name of a registered one (GET /v1/audio/voices "
    "lists them, POST /v1/audio/voices registers one from name, consent and "
    "audio_sample), or a clip as ref_audio. A server can be given a default voice."
)

CacheOutcome = Literal["hit", "miss", "none"]

CACHE_HEADER = "X-Speaker-Cache"

_EXTRA_PARAMS = "extra_params"


def unset_what_is_ignored(request: Any, presets: Container[str]) -> None:
    """Unset voice and clip of a request whose raw embedding is the speaker.

    A voice that is the placeholder is unset too, unless the checkpoint has it.
    """
    if request.speaker_embedding is not None:
        request.voice = request.ref_audio = None
    elif (
        request.voice is not None
        and PLACEHOLDER not in presets
        and request.voice.strip().lower() == PLACEHOLDER
    ):
        request.voice = None


def with_plain_voice(given: Any) -> Any:
    """Return a request's JSON object with the id alone in place of ``{"id": id}``.

    The host takes such an object, which OpenAI's client sends, at one route only.

    Raises: ValueError if it is an object without an id.
    """
    if not isinstance(given, dict):
        return given
    plain = dict(given)
    for name in _VOICE_FIELDS:
        if isinstance(voice := given.get(name), dict):
            if not isinstance(voice.get("id"), str):
                wanted = "a name, an id, or an object with an 'id'"
                raise ValueError(f"{name} must be {wanted}")
            plain[name] = voice["id"]
    return plain


def names_speaker(request: Any, presets: Container[str]) -> bool:
    """Return whether reference audio or a registered voice is to speak."""
    named = request.voice
    is_ours = named is not None and named.strip().lower() not in presets
    return request.ref_audio is not None or is_ours


@dataclass(slots=True, eq=False)
class Speaking:
    """A request that is being spoken.

    Attributes:
        record: The registered voice that speaks, once it is found.
        unchanged: A copy of the request before what is kept with its voice acted on it.
        notes: What else is to be known where a file is made of samples.
    """

    request: Any = None
    record: SpeakerRecord | None = None
    unchanged: Any = None
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)


# A context variable, because the host makes a file of samples without the request. It
# prepares a stream in a task whose variables those who read the stream do not see; so
# the route sets it, and what it holds is changed.
SPEAKING: ContextVar[Speaking | None] = ContextVar("speaking", default=None)


def begin(request: Any) -> None:
    """Have a request, of a batch or a socket also the next one, be what is spoken."""
    speaking = SPEAKING.get()
    if speaking is None or not request.is_streaming():
        SPEAKING.set(Speaking(request))
    else:
        speaking.request, speaking.record, speaking.unchanged = request, None, None
        speaking.notes.clear()


# How what is kept with a voice, of `records.EXTRAS`, acts on a request that names it.
ACTING: dict[str, Callable[[Any, Any], None]] = {}


def act(request: Any, extras: Mapping[str, Any]) -> None:
    """Have what is kept with its voice act on a request, as it was asked."""
    speaking = SPEAKING.get() or Speaking()
    if (asked := speaking.unchanged) is None:
        speaking.unchanged = request.model_copy()
    else:  # it is prepared again: its voice was replaced meanwhile
        vars(request).update(vars(asked))
        request.model_fields_set.intersection_update(asked.model_fields_set)
    for name in extras.keys() & ACTING.keys():
        ACTING[name](request, extras[name])


def single_url(ref_audio: Any) -> str:
    """Return the one URL of a request's ``ref_audio``.

    Raises: InvalidAudioError: There are several. InvalidSpeakerError: It is no URL.
    """
    urls = ref_audio if isinstance(ref_audio, list) else [ref_audio]
    if len(urls) != 1 or not isinstance(urls[0], str):
        raise InvalidAudioError("give one URL (http, https, file or data)")
    check_scheme("ref_audio", urls[0])
    return urls[0]


def clone_facts(
    request: Any, *, stored_ref_text: str | None, is_inline: bool
) -> CloneFacts:
    """Return the facts that decide the mode of a request."""
    return CloneFacts(
        given_transcript=bool((request.ref_text or "").strip()),
        stored_transcript=bool((stored_ref_text or "").strip()),
        is_inline=is_inline,
        named=(request.extra_params or {}).get(CLONE_MODE),
        x_vector_only=request.x_vector_only_mode,
    )


def as_clone(request: Any, mode: Mode, *, stored_ref_text: str | None) -> Any:
    """Return a copy that names no speaker, as the host's adapters take a clone."""
    ref_text = None
    if mode.transcript is not Transcript.UNUSED:
        given = request.ref_text or ""
        ref_text = (given if given.strip() else stored_ref_text) or None
    changed = {
        "voice": None,
        "ref_audio": None,
        "ref_text": ref_text,
        "extra_params": request.extra_params and _without_mode(request.extra_params),
        **mode.stand_in,
    }
    return request.model_copy(update=changed)


def without_speaker(request: Any) -> Any:
    """Return a copy without voice, reference audio, transcript and mode."""
    extra_params = _without_mode(request.extra_params or {})
    changed = dict.fromkeys(("voice", "ref_audio", "ref_text"))
    return request.model_copy(update={**changed, "extra_params": extra_params})


def _without_mode(extra_params: dict[str, Any]) -> dict[str, Any] | None:
    return {k: v for k, v in extra_params.items() if k != CLONE_MODE} or None


def embedding_mode(family: Family, field: str) -> Mode:
    """Return the mode in which the family speaks with a raw speaker embedding.

    Raises: InvalidSpeakerError if it has none.
    """
    if family.embedding_mode is None:
        reason = (
            f"{family.title} clones from reference audio, not from an embedding; "
            "register the voice with audio_sample and ref_text"
        )
        raise InvalidSpeakerError(field, reason)
    return family.embedding_mode


@dataclass(slots=True, eq=False)
class Outcomes:
    """The cache outcomes of one HTTP request's speakers; a batch has several."""

    seen: list[CacheOutcome] = dataclasses.field(default_factory=list)
    # Why the last speaker failed, before the host rewords the error.
    error: TTSCacheError | None = None

    def header(self) -> str:
        """``miss`` if one was encoded, ``hit`` if all were stored, else ``none``."""
        return min(self.seen, key=["miss", "hit", "none"].index, default="none")


# A context variable, because the host's serving class calls through several layers
# between our two ends, and runs several requests of a batch beside each other.
_outcomes: ContextVar[Outcomes | None] = ContextVar("speaker_outcomes", default=None)


@contextmanager
def observe_outcomes() -> Iterator[Outcomes]:
    """Collect the outcomes that the block's code reports."""
    outcomes = Outcomes()
    token = _outcomes.set(outcomes)
    try:
        yield outcomes
    finally:
        _outcomes.reset(token)


def report(outcome: CacheOutcome) -> None:
    """Add an outcome to those of the current HTTP request."""
    if (outcomes := _outcomes.get()) is not None:
        outcomes.seen.append(outcome)


def report_error(error: TTSCacheError) -> bool:
    """Store why the current HTTP request failed; return False if there is none."""
    if (outcomes := _outcomes.get()) is not None:
        outcomes.error = error
    return outcomes is not None


class _Numbers(msgspec.Struct, omit_defaults=True):
    """The options that must be numbers; the host's workers of any model read them."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    tts_local_seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    cfg_alpha: float | None = None


_SAMPLING_FIELDS = ("temperature", "top_p", "top_k")
# The scheduler reads these of every request, and its connectors set them.
_CONNECTOR_FIELDS = ("ec_transfer_params", "kv_cache_report_mode", "kv_transfer_params")


def check_sampling(extra_params: Mapping[str, Any] | None) -> None:
    """Refuse options that would end the engine. Raises: InvalidSpeakerError.

    The engine finds ``extra_args`` of other routes in the same place.
    """
    if not extra_params:
        return
    for name in _CONNECTOR_FIELDS:
        if extra_params.get(name):
            field = f"{_EXTRA_PARAMS}.{name}"
            raise InvalidSpeakerError(field, "requests cannot set it; leave it out")
    try:
        given = msgspec.to_builtins(msgspec.convert(extra_params, _Numbers))
        for name, value in given.items():
            if not math.isfinite(value):
                raise ValueError(f"{name} is not finite")
        # All options go to the engine; this refuses those too large for its message.
        known = {name: given[name] for name in _SAMPLING_FIELDS if name in given}
        SamplingParams(extra_args=dict(extra_params), **known)
    except (ValueError, VLLMValidationError) as exc:
        reason = f"{exc}; correct it, or leave it out"
        raise InvalidSpeakerError(_EXTRA_PARAMS, reason) from exc
