"""Prepares voices in an ``Omni`` engine and builds the prompts that name them."""

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from vllm_tts_cache.catalogue.segment import Segment
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.offline.ensure import OfflineEnsurer, decode_clip
from vllm_tts_cache.offline.fish_speech import FishSpeechPrompts
from vllm_tts_cache.offline.prepared import PreparedSpeaker
from vllm_tts_cache.offline.qwen3_tts import Qwen3TTSPrompts
from vllm_tts_cache.speaker.family import Family
from vllm_tts_cache.speaker.ref import SpeakerRef
from vllm_tts_cache.speaker.rpc_client import (
    DESCRIBE,
    ENCODING,
    STATS,
    SyncEngine,
    SyncWorkers,
    encoding_of,
    fingerprints_of,
)
from vllm_tts_cache.speaker.wire import EncodingCall
from vllm_tts_cache.store.encoding import Encoding
from vllm_tts_cache.store.keys import EncodingKey
from vllm_tts_cache.store.opening import open_store


class OfflineEngine(SyncEngine, Protocol):
    """``vllm_omni.entrypoints.omni.Omni``, with the method that the plugin gives it."""

    @property
    def model(self) -> Any:
        """The checkpoint: a folder, or a Hugging Face id."""
        ...


class Prompts(Protocol):
    """Builds one family's prompts."""

    @property
    def family(self) -> Family:
        """The family."""
        ...

    def prompt(
        self, speaker: PreparedSpeaker, text: str, language: str, /
    ) -> dict[str, Any]:
        """Return a prompt for ``Omni.generate``: no waveform."""
        ...


class OfflineSpeakers:
    """The voices of a batch job.

    Raises:
        ConfigError: A setting is wrong, or the model is of no family that we know.
        StorageError: The store cannot be opened.
    """

    def __init__(self, omni: OfflineEngine):
        settings = load_settings()
        self._workers = SyncWorkers(omni)
        self._prompts = _prompts(str(omni.model), self)
        self._store = open_store(settings)
        self._ensurer = OfflineEnsurer(
            self._workers, self._store, settings, self._prompts.family
        )

    def prepare(
        self, clips: Sequence[Path], ref_texts: Sequence[str | None] | None = None
    ) -> list[PreparedSpeaker]:
        """Store the clips and return when all their encodings exist.

        There may be any number of them: they are stored and encoded in windows.

        Args:
            clips: Audio files; one that was prepared before costs its decoding only.
            ref_texts: For each clip what is said in it, or None for an x-vector
                clone, which not every family has.

        Raises:
            ConfigError: There are not as many transcripts as clips, or one is missing.
            InvalidAudioError: A clip cannot be used; the message names it.
            EncodeError: An encoder failed.
            EncodeTimeoutError: No encoding was finished for as long as a request may
                wait for one (``SPEAKER_CACHE_ENCODE_TIMEOUT_SECONDS``).
            StorageError: A clip could not be stored.
            WorkerRPCError: The worker could not be asked, or clones no voices.
        """
        transcripts = self._transcripts(clips, ref_texts)
        prepared: list[PreparedSpeaker] = []
        for window in self._ensurer.windows(self._stored(clips, transcripts)):
            self._ensurer.ensure(window)
            prepared += window
        return prepared

    def prompt(
        self, speaker: PreparedSpeaker, text: str, *, language: str = "Auto"
    ) -> dict[str, Any]:
        """Build a prompt for ``Omni.generate``: no waveform.

        An encoding that was evicted since it was prepared is made again.

        Raises: InvalidSpeakerError if the text cannot be spoken; what `prepare` raises.
        """
        if not all(self._is_stored(need) for need in self._ensurer.needs(speaker)):
            self._ensurer.ensure([speaker])
        return self._prompts.prompt(speaker, text, language)

    def encoding(self, ref: SpeakerRef, name: str) -> tuple[EncodingKey, Encoding]:
        """Return one encoding of a prepared speaker, and its key.

        Raises: EncodeError if it is not there (any more); StorageError, WorkerRPCError.
        """
        key = self._key((ref.audio_sha256, name))
        if (found := self._store.read(key)) is not None:
            return key, found
        call = EncodingCall(audio_sha256=ref.audio_sha256, encoder=name)
        return key, encoding_of(self._workers.call(ENCODING, call), key)

    def stats(self) -> list[dict[str, Any]]:
        """Each worker's counters and sizes.

        Raises: WorkerRPCError.
        """
        answers = self._workers.call(STATS)
        return [{"rank": answer.rank, **answer.stats} for answer in answers]

    def _transcripts(
        self, clips: Sequence[Path], ref_texts: Sequence[str | None] | None
    ) -> list[str | None]:
        given = [None] * len(clips) if ref_texts is None else list(ref_texts)
        if len(given) != len(clips):
            raise ConfigError(f"{len(clips)} clips have {len(given)} transcripts")
        transcripts = [(text or "").strip() or None for text in given]
        family = self._prompts.family
        if not family.clones_from_embeddings and None in transcripts:
            clip = clips[transcripts.index(None)]
            raise ConfigError(f"{family.name} needs the transcript of {clip}")
        return transcripts

    def _stored(
        self, clips: Sequence[Path], transcripts: Sequence[str | None]
    ) -> Iterator[PreparedSpeaker]:
        """Store one clip after the other, as they are asked for."""
        for clip, ref_text in zip(clips, transcripts, strict=True):
            decoded = decode_clip(clip)
            self._store.keep_inline(decoded)
            audio = decoded.audio
            yield PreparedSpeaker(
                clip=clip,
                ref=SpeakerRef(audio_sha256=audio.audio_sha256, segment=Segment.INLINE),
                ref_text=ref_text,
                num_samples=audio.num_samples,
                sample_rate_hz=audio.sample_rate_hz,
            )

    def _is_stored(self, need: tuple[str, str]) -> bool:
        return self._store.is_stored(self._key(need))

    def _key(self, need: tuple[str, str]) -> EncodingKey:
        sha, name = need
        return EncodingKey(
            audio_sha256=sha, encoder_fingerprint=self._fingerprints[name]
        )

    @cached_property
    def _fingerprints(self) -> dict[str, str]:
        return fingerprints_of(self._workers.call(DESCRIBE))


def _prompts(model: str, speakers: OfflineSpeakers) -> Prompts:
    from transformers.utils.hub import cached_file

    path = cached_file(model, "config.json")
    assert path is not None  # it raises where the file is missing
    config = json.loads(Path(path).read_text())
    match config.get("model_type"):
        case "qwen3_tts":
            return Qwen3TTSPrompts(model, config)
        case "fish_qwen3_omni":
            return FishSpeechPrompts(model, config, speakers.encoding)
        case other:
            raise ConfigError(
                f"{model}: model_type is {other!r}; known are 'qwen3_tts' and "
                "'fish_qwen3_omni'"
            )
