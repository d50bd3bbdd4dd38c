"""Prepares voices in an ``Omni`` engine and builds the prompts that name them."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from vllm_tts_cache.catalogue.record import Segment
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.errors import CheckpointError, ConfigError, InvalidSpeakerError
from vllm_tts_cache.offline.ensure import OfflineEnsurer, PreparedSpeaker, decode_clip
from vllm_tts_cache.speaker.checkpoint_files import read_json
from vllm_tts_cache.speaker.family import Family, family_of_checkpoint
from vllm_tts_cache.speaker.local_checkpoint import checkpoint_dir
from vllm_tts_cache.speaker.modes import CloneFacts, Mode, Transcript
from vllm_tts_cache.speaker.ref import SpeakerRef
from vllm_tts_cache.speaker.rpc_client import (
    DESCRIBE,
    ENCODING,
    STATS,
    SyncEngine,
    SyncWorkers,
    encoding_of,
    fingerprints_of,
    refuse_elsewhere,
)
from vllm_tts_cache.speaker.wire import EncodingCall
from vllm_tts_cache.store.encoding import Encoding, EncodingKey
from vllm_tts_cache.store.opening import open_store


class OfflineEngine(SyncEngine, Protocol):
    """``vllm_omni.entrypoints.omni.Omni``, with the method that the plugin gives it."""

    @property
    def model(self) -> Any:
        """The checkpoint: a folder, or a Hugging Face id."""
        ...

    @property
    def engine(self) -> Any:
        """What runs its stages, and knows the revision that they loaded."""
        ...


class Prompts(Protocol):
    """Builds one family's prompts."""

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
        try:
            model, model_dir = _checkpoint_of(omni)
            self._family = family_of_checkpoint(model_dir)
        except CheckpointError as exc:
            raise ConfigError(str(exc)) from exc
        self._prompts = _prompts(self._family, model, model_dir, self)
        self._store = open_store(settings)
        self._ensurer = OfflineEnsurer(self._workers, self._store, settings)

    def prepare(
        self, clips: Sequence[Path], ref_texts: Sequence[str | None] | None = None
    ) -> list[PreparedSpeaker]:
        """Store the clips and return when all their encodings exist.

        There may be any number of them: they are stored and encoded in windows.

        Args:
            clips: Audio files; one that was prepared before costs its decoding only.
            ref_texts: For each clip what is said in it, or None for a clone without,
                which not every family has.

        Raises:
            ConfigError: There are not as many transcripts as clips, or one is missing.
            InvalidAudioError: A clip cannot be used; the message names it.
            EncodeError: An encoder failed.
            EncodeTimeoutError: No encoding was finished for as long as a request may
                wait for one (``SPEAKER_CACHE_ENCODE_TIMEOUT_SECONDS``).
            StorageError: A clip could not be stored.
            WorkerRPCError: The worker could not be asked, or clones no voices.
        """
        modes = self._modes(clips, ref_texts)
        prepared: list[PreparedSpeaker] = []
        for window in self._ensurer.windows(self._stored(clips, modes)):
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
        return [answer.shown for answer in self._workers.call(STATS)]

    def _modes(
        self, clips: Sequence[Path], ref_texts: Sequence[str | None] | None
    ) -> list[tuple[Mode, str | None]]:
        """Choose each clip's mode, and the transcript that it uses.

        Raises: ConfigError.
        """
        for clip in clips:
            if not isinstance(clip, str | PathLike):
                raise ConfigError(f"{clip!r}: a voice of a batch job is one clip")
        given = [None] * len(clips) if ref_texts is None else list(ref_texts)
        if len(given) != len(clips):
            raise ConfigError(f"{len(clips)} clips have {len(given)} transcripts")
        return [self._mode(*pair) for pair in zip(clips, given, strict=True)]

    def _mode(self, clip: Path, ref_text: str | None) -> tuple[Mode, str | None]:
        ref_text = (ref_text or "").strip() or None
        try:
            mode = self._family.mode(CloneFacts(given_transcript=ref_text is not None))
        except InvalidSpeakerError as exc:
            raise ConfigError(f"{clip}: {exc}") from exc
        return mode, None if mode.transcript is Transcript.UNUSED else ref_text

    def _stored(
        self, clips: Sequence[Path], modes: Sequence[tuple[Mode, str | None]]
    ) -> Iterator[PreparedSpeaker]:
        """Store one clip after the other, as they are asked for."""
        for clip, (mode, ref_text) in zip(clips, modes, strict=True):
            decoded = decode_clip(clip)
            self._store.keep_inline(decoded)
            audio = decoded.audio
            yield PreparedSpeaker(
                clip=clip,
                ref=SpeakerRef(audio_sha256=audio.audio_sha256, segment=Segment.INLINE),
                mode=mode,
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
        answers = self._workers.call(DESCRIBE)
        refuse_elsewhere(answers, self._store.home)
        return fingerprints_of(answers)


def _checkpoint_of(omni: OfflineEngine) -> tuple[str, Path]:
    """What tokenizers are loaded from, and the folder with the configs.

    Of a revision both are the folder that the host put its tokenizer into.

    Raises: CheckpointError.
    """
    [stage, *_] = omni.engine.stage_vllm_configs
    model = str(omni.model)
    revision = None if stage is None else stage.model_config.revision
    model_dir = checkpoint_dir(model, revision)
    return (model if revision is None else str(model_dir)), model_dir


def _prompts(
    family: Family, model: str, model_dir: Path, speakers: OfflineSpeakers
) -> Prompts:
    """Return what builds a family's prompts.

    Raises: ConfigError if the model clones no voices.
    """
    refusal = family.clones(model_dir)
    if refusal is None and not family.offline_part:
        refusal = f"{family.title} clones no voices through this plugin."
    if refusal is not None:
        raise ConfigError(f"{model}: {refusal}")
    config = read_json(model_dir / "config.json")
    prompts: Prompts = family.part("offline_part")(model, config, speakers.encoding)
    return prompts
