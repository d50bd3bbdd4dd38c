"""Records of speakers, and what registering and changing take.

The transcript of several clips has a line for each, in their order.
"""

import hashlib
import json
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from vllm_tts_cache.catalogue import aliases, voice_settings
from vllm_tts_cache.catalogue.names import clean, clean_new, fold, is_storable
from vllm_tts_cache.errors import InvalidSpeakerError
from vllm_tts_cache.tenants import DEFAULT_TENANT

MAX_EMBEDDING_VALUE = 65_504.0  # the largest of float16
MAX_EMBEDDING_DIM = 4096

MAX_LABELS = 20
MAX_LABEL_KEY_CHARS = 64
MAX_LABEL_VALUE_CHARS = 128
_MAX_LANGUAGE_CHARS = 35  # what RFC 5646 asks a program to make room for
_LANGUAGE = re.compile(r"[A-Za-z]{2,8}(-[A-Za-z0-9]{1,8})*")
# The first moment of the year 10000, which no date has room for.
_END_OF_TIME = 253_402_300_800.0

# What else may be kept with a voice: each function returns what is kept of a value, or
# raises InvalidSpeakerError.
EXTRAS: dict[str, Callable[[Any], Any]] = {
    "aliases": aliases.checked,
    "settings": voice_settings.checked,
}

# A list of voices holds these texts, and each request pays for a transcript's length:
# 2,000 characters are two minutes of speech, and no clip is longer than 30 s. By
# attribute: the form field, how a message names the text, and its most characters.
TEXT_LIMITS = {
    "consent": ("consent", "it", 512),
    "ref_text": ("ref_text", "it", 2000),
    "description": ("speaker_description", "it", 2000),
    "original_filename": ("audio_sample", "its file name", 255),
    "mime_type": ("audio_sample", "its media type", 127),
}


class SpeakerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A registered speaker.

    Attributes:
        tenant: Whose speaker it is; a name is unique within its tenant.
        name_key: The folded form of the name, which is compared.
        generation: Grows with every registration, whatever the name, and is never
            used again, deleted or not.
        audio_sha256: Content address of the reference audio; None for a speaker
            that was registered as an embedding.
        num_samples: Length of the mono reference audio; 0 without audio.
        sample_rate_hz: Its rate; 0 without audio.
        ref_text: What is said in the reference audio.
        embedding_dim: Values of the registered embedding; None with audio.
        file_size: Bytes of the uploaded file.
        created_at: Unix seconds, as all times.
        speaker_id: Its public id, which renaming and registering anew do not change.
        consent_id: The consent recording that it stands on, if ``consent`` names one.
        language: BCP 47 tag.
        expires_at: When it is deleted; None for never.
        updated_at: When it was last changed; None if it never was.
        clip_starts_json: Where its clips begin; None for one clip.
        extras_json: What else is kept with it, see ``EXTRAS``.
    """

    tenant: str = DEFAULT_TENANT
    name: str
    name_key: str
    generation: int
    speaker_id: str
    audio_sha256: str | None
    num_samples: int
    sample_rate_hz: int
    ref_text: str | None
    consent: str
    description: str | None
    embedding_dim: int | None
    mime_type: str | None
    original_filename: str | None
    file_size: int | None
    created_at: float
    consent_id: str | None
    language: str | None
    labels_json: str | None
    expires_at: float | None
    updated_at: float | None
    clip_starts_json: str | None = None
    extras_json: str | None = None

    @property
    def clip_starts(self) -> tuple[int, ...]:
        """The first sample of each clip; ``(0,)`` for one, and without audio."""
        stored = self.clip_starts_json
        return tuple(json.loads(stored)) if stored else (0,)

    @property
    def num_clips(self) -> int:
        """How many clips its reference audio is made of; 1 without audio."""
        return len(self.clip_starts)

    @property
    def clip_seconds(self) -> list[float]:
        """How long each clip lasts; only for a speaker with audio."""
        ends = (*self.clip_starts, self.num_samples)
        return [(end - start) / self.sample_rate_hz for start, end in pairwise(ends)]

    @property
    def labels(self) -> dict[str, str]:
        """The labels, parsed."""
        return json.loads(self.labels_json) if self.labels_json else {}

    @property
    def aliases(self) -> list[str]:
        """What else it is called by."""
        return self.extras.get("aliases") or []

    @property
    def extras(self) -> dict[str, Any]:
        """What else is kept with it, parsed."""
        return json.loads(self.extras_json) if self.extras_json else {}

    def has_expired(self, now: float) -> bool:
        """Whether it has expired by `Database.now`: no request may use it any more."""
        return self.expires_at is not None and self.expires_at <= now

    @property
    def seconds(self) -> float:
        """Length of the reference audio; 0.0 without audio."""
        return self.num_samples / self.sample_rate_hz if self.sample_rate_hz else 0.0


class Identity(NamedTuple):
    """A voice's or consent recording's id and times, which an import keeps.

    Attributes:
        created_at: When it was first registered, in Unix seconds.
        updated_at: When it was last changed; None if it never was.
    """

    public_id: str
    created_at: float
    updated_at: float | None = None


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """The ``Idempotency-Key`` of a request that its client may send more than once.

    The transaction that does the request records the key: a server that gets it again
    does not repeat the request, even if the first one was killed before it answered.
    ``request_hash`` is of tenant, key and all that is asked for.
    """

    key_hash: str
    request_hash: str

    @classmethod
    def of(
        cls, key: str | None, tenant: str, *asked: object
    ) -> "IdempotencyKey | None":
        """Return the key of a request; None if its client sent none."""
        if key is None:
            return None
        digest = hashlib.sha256(repr((tenant, key)).encode())
        key_hash = digest.hexdigest()
        for each in asked:
            data = each if isinstance(each, bytes) else repr(each).encode()
            digest.update(hashlib.sha256(data).digest())
        return cls(key_hash, digest.hexdigest())


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSpeaker:
    """What registering takes: a name, and either stored audio or an embedding.

    Attributes:
        clip_starts: Where the clips of its audio begin; of several, ``ref_text`` has
            a line for each.
        embedding: Finite values, kept as float32; at most ``MAX_EMBEDDING_DIM``.
        created_at: None for the time of registration.
        identity: Id and times to keep instead of new ones; used only if it replaces
            no voice and no voice of any tenant has the id.
        taken_over: Whether stock vLLM-Omni accepted it, and had not all of our rules.
        labels: Key -> value; see `check_labels` for limits.
        extras: Values of ``EXTRAS``; those that are left out stay those of the voice
            that is replaced.
        precompute: Whether its encodings are made before a request needs them.
        (The others are those of `SpeakerRecord`.)

    Raises: InvalidSpeakerError: A field cannot be registered.
    """

    name: str
    consent: str
    tenant: str = DEFAULT_TENANT
    audio_sha256: str | None = None
    num_samples: int = 0
    sample_rate_hz: int = 0
    clip_starts: tuple[int, ...] = (0,)
    embedding: tuple[float, ...] | None = None
    ref_text: str | None = None
    description: str | None = None
    mime_type: str | None = None
    original_filename: str | None = None
    file_size: int | None = None
    created_at: float | None = None
    identity: Identity | None = None
    language: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    extras: Mapping[str, Any] = field(default_factory=dict[str, Any])
    expires_at: float | None = None
    precompute: bool = True
    idempotency_key: IdempotencyKey | None = None
    name_key: str = field(init=False)
    taken_over: InitVar[bool] = False

    def __post_init__(self, taken_over: bool) -> None:
        name = clean(self.name) if taken_over else clean_new(self.name)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "name_key", fold(name))
        ref_text = transcript_of_clips(self.ref_text, len(self.clip_starts))
        object.__setattr__(self, "ref_text", ref_text)
        for attribute in TEXT_LIMITS:
            check_text(attribute, getattr(self, attribute), any_length=taken_over)
        check_language(self.language)
        check_labels(self.labels)
        object.__setattr__(self, "extras", checked_extras(self.extras))
        check_expiry(self.expires_at)
        if (self.audio_sha256 is None) == (self.embedding is None):
            reason = "give either reference audio or an embedding"
            raise InvalidSpeakerError("speaker", reason)
        if self.embedding is not None:
            check_embedding(self.embedding)
        elif self.num_samples <= 0 or self.sample_rate_hz <= 0:
            raise InvalidSpeakerError("audio_sample", "it has no samples")


def check_language(language: str | None) -> None:
    """Refuse a text that is no BCP 47 tag (``de``, ``pt-BR``); None passes.

    Raises: InvalidSpeakerError.
    """
    if language is None:
        return
    if len(language) > _MAX_LANGUAGE_CHARS or not _LANGUAGE.fullmatch(language):
        reason = f"it is no language tag of at most {_MAX_LANGUAGE_CHARS} characters"
        raise InvalidSpeakerError("language", f"{reason}, such as 'de' or 'pt-BR'")


def check_labels(labels: Mapping[str, str]) -> None:
    """Refuse too many labels, long ones, and two whose keys are equal when folded.

    Raises: InvalidSpeakerError.
    """
    if len(labels) > MAX_LABELS:
        reason = f"{len(labels)} are given, at most {MAX_LABELS} are allowed"
        raise InvalidSpeakerError("labels", reason)
    for key, value in labels.items():
        _check_label("the key", key, MAX_LABEL_KEY_CHARS)
        _check_label(f"the value of {key!r}", value, MAX_LABEL_VALUE_CHARS)
    if len({fold(key) for key in labels}) < len(labels):
        raise InvalidSpeakerError("labels", "two keys differ in case only; rename one")


def check_expiry(expires_at: float | None) -> None:
    """Refuse an invalid expiry time; None passes. Raises: InvalidSpeakerError."""
    if expires_at is None:
        return
    if not math.isfinite(expires_at) or expires_at >= _END_OF_TIME:
        raise InvalidSpeakerError("expires_at", "give a time before the year 10000")


def check_is_to_come(expires_at: float | None, now: float) -> None:
    """Refuse an expiry before ``now``, the catalogue's time; None passes.

    Raises: InvalidSpeakerError.
    """
    if expires_at is not None and expires_at <= now:
        reason = "it is in the past; to remove the voice now, DELETE it"
        raise InvalidSpeakerError("expires_at", reason)


def checked_extras(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is kept of values of ``EXTRAS``, None for an empty one.

    Raises: InvalidSpeakerError.
    """
    if unknown := given.keys() - EXTRAS.keys():
        reason = f"this version does not know {min(unknown)!r:.60}"
        raise InvalidSpeakerError("extras", reason)
    return {n: v if v is None else EXTRAS[n](v) or None for n, v in given.items()}


def to_json(kept: Mapping[str, Any]) -> str | None:
    """Return labels or extras as the catalogue stores them: JSON, None if empty."""
    kept = {name: value for name, value in kept.items() if value is not None}
    return json.dumps(kept, ensure_ascii=False) if kept else None


def _check_label(what: str, text: str, max_chars: int) -> None:
    if not text.strip() or len(text) > max_chars:
        reason = f"{what} must have 1 to {max_chars} characters"
        raise InvalidSpeakerError("labels", reason)
    if not is_storable(text) or not text.isprintable():
        raise InvalidSpeakerError("labels", f"{what} contains unprintable characters")


def _lines(ref_text: str) -> list[str]:
    # Only what ends a line in every editor does so here.
    unified = ref_text.replace("\r\n", "\n").replace("\r", "\n")
    return [line for each in unified.split("\n") if (line := each.strip())]


def transcript_of_clips(ref_text: str | None, num_clips: int) -> str | None:
    """Return the transcript of so many clips; for one clip it stays as written.

    Raises: InvalidSpeakerError if there are not as many lines as clips.
    """
    if ref_text is None or num_clips == 1:
        return ref_text
    lines = _lines(ref_text)
    if len(lines) == num_clips:
        return "\n".join(lines)
    if not lines:
        return None
    num_lines = "1 line" if len(lines) == 1 else f"{len(lines)} lines"
    reason = f"it has {num_lines}, and the voice {num_clips} clips; write one line"
    raise InvalidSpeakerError("ref_text", f"{reason} for each clip, in their order")


def joined_transcript(ref_texts: Sequence[str], num_clips: int) -> str | None:
    """Return the one transcript of a form that gives it once, or once for each clip.

    Raises: InvalidSpeakerError if it is given another number of times.
    """
    given = [text.strip() for text in ref_texts]
    if not any(given):
        return None
    if len(given) == 1:
        return transcript_of_clips(given[0], num_clips)
    if len(given) != num_clips:
        there = "is 1 clip" if num_clips == 1 else f"are {num_clips} clips"
        reason = f"it is given {len(given)} times, and there {there}; give it once"
        reason += " for each, or once with a line for each"
        raise InvalidSpeakerError("ref_text", reason)
    lines = [" ".join(_lines(text)) for text in given]
    return transcript_of_clips("\n".join(lines), num_clips)


def check_text(attribute: str, text: str | None, *, any_length: bool = False) -> None:
    """Refuse a text that cannot be stored or is too long.

    Routes call it before they spend time on a text; `NewSpeaker` calls it for each of
    ``TEXT_LIMITS``. None passes.

    Raises: InvalidSpeakerError: The message names the form field.
    """
    form_field, what, max_chars = TEXT_LIMITS[attribute]
    if text is None:
        return
    if len(text) > max_chars and not any_length:
        reason = f"{what} has {len(text)} characters, at most {max_chars} are allowed"
        raise InvalidSpeakerError(form_field, reason)
    if not is_storable(text):
        reason = f"{what} contains an unpaired surrogate or NUL"
        raise InvalidSpeakerError(form_field, reason)


def pack_embedding(embedding: tuple[float, ...]) -> bytes:
    """Return the embedding as float32, little-endian.

    Raises: OverflowError: A value does not fit into float32.
    """
    return struct.pack(f"<{len(embedding)}f", *embedding)


def unpack_embedding(data: bytes) -> tuple[float, ...]:
    """Return the values that `pack_embedding` packed."""
    return struct.unpack(f"<{len(data) // 4}f", data)


def check_embedding(embedding: Sequence[float]) -> None:
    """Refuse a raw embedding that no model could compute with.

    One value that is infinite in the model's dtype makes NaN of all that the request
    writes to its KV blocks, and the next request that gets the blocks reads that.

    Raises: InvalidSpeakerError.
    """
    if not 1 <= len(embedding) <= MAX_EMBEDDING_DIM:
        reason = f"it has {len(embedding)} values, allowed are 1 to {MAX_EMBEDDING_DIM}"
        raise InvalidSpeakerError("speaker_embedding", reason)
    if not all(abs(value) <= MAX_EMBEDDING_VALUE for value in embedding):  # nor NaN
        reason = f"each value must be a number of at most {MAX_EMBEDDING_VALUE:,.0f}"
        raise InvalidSpeakerError("speaker_embedding", reason)


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
    """New values for some fields of a speaker; the others stay.

    ``given`` is the new value, None to remove it, by ``name``, ``description``,
    ``language``, ``labels``, ``ref_text``, ``expires_at``, and those of ``EXTRAS``.

    Raises: InvalidSpeakerError: No value is given, or one is not allowed.
    """

    given: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not self.given:
            raise InvalidSpeakerError("body", "it changes no field; give one")
        for name, check in _CHECKS.items():
            if name in self.given:
                check(self.given[name])
        extras = checked_extras({n: self.given[n] for n in EXTRAS if n in self.given})
        object.__setattr__(self, "given", {**self.given, **extras})

    def columns(self, record: SpeakerRecord, now: float) -> dict[str, Any]:
        """Return the columns of a record that change, and their new values.

        Raises: InvalidSpeakerError: A transcript is given for a voice without audio, or
            without one line for each clip.
        """
        if self.given.get("ref_text") and record.audio_sha256 is None:
            reason = "the voice is an embedding, without words; leave it out"
            raise InvalidSpeakerError("ref_text", reason)
        new: dict[str, Any] = {**self.given, "updated_at": now}
        if "ref_text" in new:
            new["ref_text"] = transcript_of_clips(new["ref_text"], record.num_clips)
        if "name" in new:
            new["name"] = clean_new(new["name"])
            new["name_key"] = fold(new["name"])
        if "labels" in new:
            new["labels_json"] = to_json(new.pop("labels") or {})
        if extras := {name: new.pop(name) for name in EXTRAS.keys() & new}:
            new["extras_json"] = to_json({**record.extras, **extras})
        return new
