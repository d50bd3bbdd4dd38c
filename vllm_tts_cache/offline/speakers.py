"""Prepares voices in an ``Omni`` engine and builds the prompts that name them."""

import itertools
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from vllm_tts_cache.audio.decode import decode_path
from vllm_tts_cache.catalogue.records import Segment
from vllm_tts_cache.config import Settings, load_settings
from vllm_tts_cache.errors import (
    CheckpointError,
    ConfigError,
    EncodeError,
    EncodeTimeoutError,
    InvalidSpeakerError,
)
from vllm_tts_cache.speaker.checkpoint_dir import checkpoint_dir, read_json
from vllm_tts_cache.speaker.family import (
    CloneFacts,
    Family,
    Mode,
    Transcript,
    family_of_checkpoint,
)
from vllm_tts_cache.speaker.reference import SpeakerRef
from vllm_tts_cache.speaker.rpc_client import (
    DESCRIBE,
    ENCODING,
    STATS,
    WANT,
    SyncEngine,
    SyncWorkers,
    encoding_of,
    fingerprints_of,
    refuse_elsewhere,
)
from vllm_tts_cache.speaker.wire import (
    EncodingCall,
    JobState,
    Want,
    WantCall,
)
from vllm_tts_cache.store.encoding import Encoding, EncodingKey
from vllm_tts_cache.store.opening import open_store
from vllm_tts_cache.store.speaker_store import SpeakerStore

# An RPC takes the worker off decoding; nothing decodes while a list is prepared.
_POLL_SECONDS = 0.05
_LEASE_SECONDS = 10.0
# The store may be shared with a server whose inline clips push these out meanwhile.
_MAX_TIMES_STORED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSpeaker:
    """A clip whose encodings exist.

    Attributes:
        clip: Its file; read again if the store has evicted it.
        ref: Its content address.
        mode: How it is cloned.
        ref_text: What is said in it, if the mode uses it.
        num_samples: At its own rate.
        sample_rate_hz: Of the clip.
    """

    clip: Path
    ref: SpeakerRef
    mode: Mode
    ref_text: str | None
    num_samples: int
    sample_rate_hz: int


class OfflineEnsurer:
    """Has the workers encode clips, in windows that the store and the queue hold."""

    def __init__(self, workers: SyncWorkers, store: SpeakerStore, settings: Settings):
        self._workers = workers
        self._store = store
        self._settings = settings
        self._client_id = uuid.uuid4().hex
        self._ids = itertools.count()
        self._withdrawn: list[int] = []

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Encoder name -> fingerprint. Raises: WorkerRPCError."""
        answers = self._workers.call(DESCRIBE)
        refuse_elsewhere(answers, self._store.store_id)
        return fingerprints_of(answers)

    def key(self, audio_sha256: str, encoder: str) -> EncodingKey:
        """Return the key of one encoding. Raises: WorkerRPCError."""
        fingerprint = self.fingerprints[encoder]
        return EncodingKey(audio_sha256=audio_sha256, encoder_fingerprint=fingerprint)

    def keys(self, speaker: PreparedSpeaker) -> set[EncodingKey]:
        """Return which encodings its mode needs. Raises: WorkerRPCError."""
        sha = speaker.ref.audio_sha256
        return {self.key(sha, name) for name in speaker.mode.encoders}

    def windows(
        self, speakers: Iterable[PreparedSpeaker]
    ) -> Iterator[list[PreparedSpeaker]]:
        """Cut a list into parts that can be stored and queued together.

        A part takes at most half of what is kept of inline audio, so that nothing of
        it is evicted before it is encoded. The list is read as the parts are taken.
        """
        window: list[PreparedSpeaker] = []
        keys: set[EncodingKey] = set()
        num_bytes = 0
        for speaker in speakers:
            added, clip_bytes = self.keys(speaker), 4 * speaker.num_samples
            is_full = (
                len(keys | added) > self._settings.max_waiting_inline
                or num_bytes + clip_bytes > self._settings.inline_audio_max_bytes // 2
            )
            if window and is_full:
                yield window
                window, keys, num_bytes = [], set(), 0
            window.append(speaker)
            keys, num_bytes = keys | added, num_bytes + clip_bytes
        if window:
            yield window

    def ensure(self, speakers: Sequence[PreparedSpeaker]) -> None:
        """Return when all encodings of the speakers exist.

        Raises: EncodeError, EncodeTimeoutError, InvalidAudioError, WorkerRPCError.
        """
        clips = {speaker.ref.audio_sha256: speaker.clip for speaker in speakers}
        keys = set().union(*map(self.keys, speakers))
        wants = {next(self._ids): key for key in keys}
        try:
            self._wait(wants, clips)
        finally:
            # What failed, or nobody waits for, is no answer to the next clips.
            self._withdrawn += wants

    def _wait(self, wants: dict[int, EncodingKey], clips: Mapping[str, Path]) -> None:
        """Return when all wants have ended well; those that have not are left.

        Raises: As `ensure`.
        """
        num_stored = 0
        patience_seconds = self._settings.encode_timeout_seconds
        num_ended, ended_at = -1, time.monotonic()
        while wants:
            states, num_finished = self._want(wants)
            self._withdrawn = list(states)
            ended = {number: wants.pop(number) for number in states}
            lost = {key for n, key in ended.items() if states[n] is JobState.NO_AUDIO}
            if lost:
                num_stored += 1
                if num_stored > _MAX_TIMES_STORED:
                    clip = min(str(clips[key.audio_sha256]) for key in lost)
                    raise EncodeError(
                        f"{clip} was evicted {_MAX_TIMES_STORED} times "
                        "before it was encoded. Raise "
                        "SPEAKER_CACHE_INLINE_AUDIO_MAX_BYTES, or give this job a "
                        "SPEAKER_SAMPLES_DIR of its own."
                    )
                for sha in sorted({key.audio_sha256 for key in lost}):
                    self._store.keep_inline(decode_path(clips[sha]))
                wants |= {next(self._ids): key for key in lost}
            elif wants:
                if num_finished != num_ended:
                    num_ended, ended_at = num_finished, time.monotonic()
                if time.monotonic() - ended_at > patience_seconds:
                    raise EncodeTimeoutError(
                        f"{len(wants)} encodings are missing and none was finished "
                        f"within {patience_seconds:g} s."
                    )
                time.sleep(_POLL_SECONDS)

    def _want(
        self, wants: Mapping[int, EncodingKey]
    ) -> tuple[dict[int, JobState], int]:
        """Return which wants have ended how, and how many jobs the workers ended.

        Raises: EncodeError, WorkerRPCError.
        """
        # A worker knows a want by its id, however often it is told of it.
        new = [
            Want(
                id=number,
                audio_sha256=key.audio_sha256,
                fingerprint=key.encoder_fingerprint,
                segment=Segment.INLINE.value,
            )
            for number, key in wants.items()
        ]
        call = WantCall(self._client_id, new, self._withdrawn, _LEASE_SECONDS)
        # The other ranks load what rank 0 publishes.
        answers = [a for a in self._workers.call(WANT, call) if a.rank == 0]
        ended: dict[int, list[JobState]] = {}
        reports = chain.from_iterable(answer.reports for answer in answers)
        for report in (report for report in reports if report.id in wants):
            if report.state in (JobState.FAILED, JobState.NO_ENCODER, JobState.REFUSED):
                raise EncodeError(f"A clip was not encoded: {report.reason}")
            if report.state is not JobState.ENCODING:
                ended.setdefault(report.id, []).append(report.state)
        states = {
            number: max(states, key=lambda state: state is JobState.NO_AUDIO)
            for number, states in ended.items()
            if len(states) == len(answers) or JobState.NO_AUDIO in states
        }
        return states, sum(answer.num_finished for answer in answers)


class OfflineEngine(SyncEngine, Protocol):
    """``vllm_omni.entrypoints.omni.Omni``, with the method that the plugin gives it."""

    model: Any  # the checkpoint: a folder, or a Hugging Face id
    engine: Any  # runs its stages, and knows the revision that they loaded


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
        if not all(map(self._store.is_stored, self._ensurer.keys(speaker))):
            self._ensurer.ensure([speaker])
        return self._prompts.prompt(speaker, text, language)

    def encoding(self, ref: SpeakerRef, name: str) -> tuple[EncodingKey, Encoding]:
        """Return one encoding of a prepared speaker, and its key.

        Raises: EncodeError if it is not there (any more); StorageError, WorkerRPCError.
        """
        key = self._ensurer.key(ref.audio_sha256, name)
        if (found := self._store.read(key)) is not None:
            return key, found
        call = EncodingCall(key.audio_sha256, key.encoder_fingerprint)
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
            decoded = decode_path(clip)
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
