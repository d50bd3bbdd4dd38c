"""The catalogue as the host expects it, for models that no family of ours serves.

The host's adapters look voices up on the event loop, which must not wait for a database
behind a network. So `CachedServingSpeech` first reads the voices that a request names,
in threads, and `known` answers the host from them. For a model that speaks with no
registered voice, none is stored.
"""

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from vllm_tts_cache.errors import SpeakerRequestError, TTSCacheError
from vllm_tts_cache.speaker.family import clips_problem
from vllm_tts_cache.store.speaker_store import SpeakerStore, StoredSpeaker

# The MOSS checkpoints that speak by a description; one adapter serves all of MOSS.
_MOSS_WITHOUT_CLIPS = frozenset({"sound_effect", "voice_generator"})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostVoice:
    """What the host may read of a voice.

    Attributes:
        row: The voice as the host keeps voices; None if no voice has the name.
        audio: Samples, ``(num_samples,)`` float32, and their rate in Hz.
        embedding: The raw embedding of a voice that was registered without audio.
        error: Why the voice, or its audio, could not be read.
    """

    row: dict[str, Any] | None = None
    audio: tuple[Any, int] | None = None
    embedding: list[float] | None = None
    error: TTSCacheError | None = None


NO_VOICE = HostVoice()
_known: ContextVar[Mapping[str, HostVoice]] = ContextVar("host_voices")


@contextmanager
def known(voices: Mapping[str, HostVoice]) -> Iterator[None]:
    """Answer the host's look-ups in the block by voices, under lower-case names."""
    token = _known.set({**_known.get({}), **voices})
    try:
        yield
    finally:
        _known.reset(token)


def known_names() -> Set[str]:
    """Return the lower-case names that were read for this request, or its batch."""
    return _known.get({}).keys()


def known_voice(name: str) -> HostVoice:
    """Return the voice that was read. Raises: StorageError if it could not be read."""
    voice = _known.get({}).get(name.lower(), NO_VOICE)
    if voice.row is None and voice.error is not None:
        raise voice.error
    return voice


def read_voice(store: SpeakerStore, found: StoredSpeaker) -> HostVoice:
    """Read what the host may look up of a voice; for a thread."""
    record, audio, error = found.record, None, None
    row = {
        "name": record.name,
        "consent": record.consent,
        "created_at": record.generation,
        "ref_text": record.ref_text,
        "speaker_description": record.description,
        "mime_type": record.mime_type,
        "file_size": record.file_size,
        "sample_rate": record.sample_rate_hz,
        "embedding_source": "audio" if record.audio_sha256 else "direct",
        "embedding_dim": record.embedding_dim,
        # The host checks that it exists; audio is read by `_load_uploaded_audio`.
        "file_path": str(store.directory),
    }
    try:
        audio = _audio(store, found)
    except TTSCacheError as exc:
        error = exc
    values = store.speaker_embedding(record)
    embedding = None if values is None else list(values)
    return HostVoice(row=row, audio=audio, embedding=embedding, error=error)


class KnownVoices(Mapping[str, dict[str, Any]]):
    """The host's ``uploaded_speakers``: those that the current request names."""

    def __getitem__(self, name: str) -> dict[str, Any]:
        if (row := known_voice(name).row) is None:
            raise KeyError(name)
        return row

    def __iter__(self) -> Iterator[str]:
        known = _known.get({}).items()
        return (name for name, voice in known if voice.row is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class NoMemo(dict[str, str]):
    """Stores no waveform by name, as the host would: a voice may be replaced."""

    def __setitem__(self, name: str, url: str) -> None:
        """Do not store the waveform."""


def _audio(store: SpeakerStore, found: StoredSpeaker) -> tuple[Any, int] | None:
    if found.record.audio_sha256 is None:
        return None
    if (problem := clips_problem(None, found.record.num_clips)) is not None:
        name = found.record.name
        raise SpeakerRequestError(f"Voice {name!r} cannot be spoken here: {problem}.")
    audio = store.read_audio(found.record.audio_sha256)
    return None if audio is None else (audio.samples, audio.sample_rate_hz)


@dataclass(frozen=True, slots=True)
class OtherModel:
    """A model of the host's that no family of ours serves.

    Attributes:
        takes_clips: Whether the host speaks with voices that were registered by a clip.
        takes_embeddings: Whether it speaks with those registered by a raw embedding.
    """

    title: str
    takes_clips: bool = True
    takes_embeddings: bool = False

    @property
    def note(self) -> str:
        """What the host does with reference audio on this model, in a sentence."""
        if not self.takes_clips:
            return (
                f"{self.title} speaks with no voice that is registered by a clip, so "
                "none is stored for it."
            )
        return (
            f"{self.title} is not among the models whose reference audio is cached "
            "here: the host reads a voice's clip anew, so there is nothing to "
            "precompute."
        )


# The host's name of an adapter -> its model. A model of the host's that is neither here
# nor a family is taken for one that takes clips and embeddings: see `of_model`.
OTHER_MODELS: Mapping[str, OtherModel] = {
    "audex": OtherModel("Audex", takes_clips=False),
    "audex_tta": OtherModel("Audex TTA", takes_clips=False),
    "auk": OtherModel("AuK", takes_clips=False),  # a clip comes with each request
    "covo_audio": OtherModel("Covo-Audio", takes_clips=False),
    "fish_omni_tts": OtherModel("Fish Audio Drama 3"),
    "gepard": OtherModel("Gepard", takes_clips=False),
    "glm_tts": OtherModel("GLM-TTS"),
    "indextts2": OtherModel("IndexTTS 2"),
    "indextts2_5": OtherModel("IndexTTS 2.5"),
    # Its embeddings come with a request, and never from a registered voice.
    "ming_flash_omni_tts": OtherModel("Ming-flash-omni TTS", takes_clips=False),
    "ming_tts": OtherModel("Ming TTS", takes_embeddings=True),
    "minimax_music3": OtherModel("MiniMax Music 3", takes_clips=False),
    "moss_tts": OtherModel("MOSS-TTS"),
    "moss_tts_nano": OtherModel("MOSS-TTS-Nano"),
    "step_audio2": OtherModel("Step-Audio2", takes_clips=False),
    "yue2": OtherModel("YuE2", takes_clips=False),
}


def of_model(adapter_name: str | None, adapter: Any = None) -> OtherModel:
    """Return the model of the host's adapter of this name."""
    unknown = OtherModel("This model", takes_embeddings=True)
    model = OTHER_MODELS.get(adapter_name or "", unknown)
    if getattr(adapter, "_moss_variant", None) in _MOSS_WITHOUT_CLIPS:
        return replace(model, takes_clips=False)
    return model
