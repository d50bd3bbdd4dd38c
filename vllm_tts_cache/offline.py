"""Voices for a batch job without a server: ``OfflineSpeakers(Omni(...))``.

The worker encodes in the background, on the same storage as a server: a job does not
encode again what a server has encoded, nor a server what a job has.
"""

import itertools
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from vllm_tts_cache import errors
from vllm_tts_cache.audio.decode import decode_path
from vllm_tts_cache.audio.reference import Segment
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.speaker import rpc_client
from vllm_tts_cache.speaker.checkpoint_dir import checkpoint_dir, read_json
from vllm_tts_cache.speaker.family import (
    CloneFacts,
    Mode,
    Transcript,
    family_of_checkpoint,
)
from vllm_tts_cache.speaker.reference import SpeakerRef, encoders_id, with_keyed_salt
from vllm_tts_cache.speaker.wire import (
    DescribeCall,
    EncodingCall,
    JobState,
    Want,
    WantCall,
)
from vllm_tts_cache.store.encoding import Encoding, EncodingKey
from vllm_tts_cache.store.opening import open_store

# An RPC interrupts decoding, but nothing decodes while `OfflineSpeakers` prepares.
_POLL_SECONDS = 0.05
_LEASE_SECONDS = 10.0
_FAILED = JobState.FAILED, JobState.AWAY, JobState.NO_ENCODER, JobState.REFUSED
# The store may be shared with a server whose inline clips evict those of a job.
_MAX_TIMES_STORED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSpeaker:
    """A clip whose encodings exist.

    Attributes:
        clip: The clip's file; read again if the store has evicted the audio.
        ref_text: What is said in the clip, if the mode uses a transcript.
        num_samples: At the clip's own rate.
    """

    clip: Path
    ref: SpeakerRef
    mode: Mode
    ref_text: str | None
    num_samples: int
    sample_rate_hz: int


class OfflineSpeakers:
    """The voices of a batch job.

    Args:
        omni: ``vllm_omni.entrypoints.omni.Omni``.

    Raises:
        ConfigError: A setting is wrong, or the model is of no family that we know, or
            clones no voices.
        StorageError: The store cannot be opened.
    """

    def __init__(self, omni: Any):
        self._settings = load_settings()
        self._workers = rpc_client.SyncWorkers(omni)
        [stage, *_] = omni.engine.stage_vllm_configs
        revision = None if stage is None else stage.model_config.revision
        model = str(omni.model)
        try:
            model_dir = checkpoint_dir(model, revision)
            self._family = family = family_of_checkpoint(model_dir)
        except errors.CheckpointError as exc:
            raise errors.ConfigError(str(exc)) from exc
        # With a revision the host has downloaded its tokenizer into that folder.
        model = model if revision is None else str(model_dir)
        refusal = family.clones(model_dir)
        if refusal is None and not family.offline_part:
            refusal = f"{family.title} clones no voices through this plugin."
        if refusal is not None:
            raise errors.ConfigError(f"{model}: {refusal}")
        config = read_json(model_dir / "config.json")
        self._prompts = family.part("offline_part")(model, config, self.encoding)
        self._store = open_store(self._settings)
        self._secret = self._store.database.secret()
        self._client_id = uuid.uuid4().hex
        self._ids = itertools.count()
        self._withdrawn: list[int] = []

    def prepare(
        self, clips: Sequence[Path], ref_texts: Sequence[str | None] | None = None
    ) -> list[PreparedSpeaker]:
        """Store the clips and return when all their encodings exist.

        There may be any number of them: they are stored and encoded in windows.

        Args:
            clips: Audio files; one that was prepared before is only decoded.
            ref_texts: For each clip what is said in it, or None for a clone without a
                transcript, which not every family can make.

        Raises:
            ConfigError: There are not as many transcripts as clips, or one is missing.
            InvalidAudioError: A clip cannot be used; the message names it.
            EncodeError: An encoder failed.
            EncodeTimeoutError: No encoding was finished for as long as a request may
                wait for one (``SPEAKER_CACHE_ENCODE_TIMEOUT_SECONDS``).
            StorageError: A clip could not be stored.
            WorkerRPCError: The worker did not answer, or clones no voices.
        """
        given = [None] * len(clips) if ref_texts is None else list(ref_texts)
        if len(given) != len(clips):
            num_given = len(given)
            raise errors.ConfigError(f"{len(clips)} clips have {num_given} transcripts")
        modes = list(map(self._mode, clips, given))
        prepared: list[PreparedSpeaker] = []
        for window in self._windows(map(self._stored, clips, modes)):
            self._ensure(window)
            prepared += window
        return prepared

    def prompt(
        self, speaker: PreparedSpeaker, text: str, *, language: str = "Auto"
    ) -> dict[str, Any]:
        """Build a prompt for ``Omni.generate``, without a waveform.

        An encoding that was evicted since `prepare` is made again.

        Raises: InvalidSpeakerError if the text cannot be spoken; what `prepare` raises.
        """
        exists = self._store.files.exists
        keys = self._keys(speaker)
        if not all(exists(k.audio_sha256, k.encoder_fingerprint) for k in keys):
            self._ensure([speaker])
        ref = speaker.ref.signed(self._secret, encoders_id(self._fingerprints))
        prompt = self._prompts.prompt(replace(speaker, ref=ref), text, language)
        return with_keyed_salt(prompt, self._secret)

    def encoding(self, ref: SpeakerRef, name: str) -> tuple[EncodingKey, Encoding]:
        """Return one encoding of a prepared speaker, and its key.

        Raises: EncodeError if there is none (any more); StorageError, WorkerRPCError.
        """
        key = self._key(ref.audio_sha256, name)
        if (found := self._store.read(key)) is not None:
            return key, found
        call = EncodingCall(key.audio_sha256, key.encoder_fingerprint)
        answers = self._workers.call(rpc_client.ENCODING, call)
        return key, rpc_client.encoding_of(answers, key)

    def stats(self) -> list[dict[str, Any]]:
        """Each worker's counters and sizes. Raises: WorkerRPCError."""
        return [answer.shown for answer in self._workers.call(rpc_client.STATS)]

    def _mode(self, clip: Path, ref_text: str | None) -> tuple[Mode, str | None]:
        """Choose the mode, and the transcript that it uses. Raises: ConfigError."""
        if not isinstance(clip, str | PathLike):
            reason = "a voice of a batch job is one clip"
            raise errors.ConfigError(f"{clip!r}: {reason}")
        ref_text = (ref_text or "").strip() or None
        try:
            mode = self._family.mode(CloneFacts(given_transcript=ref_text is not None))
        except errors.InvalidSpeakerError as exc:
            raise errors.ConfigError(f"{clip}: {exc}") from exc
        return mode, None if mode.transcript is Transcript.UNUSED else ref_text

    def _stored(self, clip: Path, how: tuple[Mode, str | None]) -> PreparedSpeaker:
        decoded = decode_path(clip)
        self._store.store_inline(decoded)
        audio, (mode, ref_text) = decoded.audio, how
        return PreparedSpeaker(
            clip=clip,
            ref=SpeakerRef(audio_sha256=audio.audio_sha256, segment=Segment.INLINE),
            mode=mode,
            ref_text=ref_text,
            num_samples=audio.num_samples,
            sample_rate_hz=audio.sample_rate_hz,
        )

    @cached_property
    def _fingerprints(self) -> dict[str, str]:
        """Encoder name -> fingerprint. Raises: WorkerRPCError."""
        answers = self._workers.call(rpc_client.DESCRIBE, DescribeCall(self._secret))
        rpc_client.refuse_elsewhere(answers, self._store.store_id)
        return rpc_client.fingerprints_of(answers)

    def _key(self, audio_sha256: str, encoder: str) -> EncodingKey:
        fingerprint = self._fingerprints[encoder]
        return EncodingKey(audio_sha256=audio_sha256, encoder_fingerprint=fingerprint)

    def _keys(self, speaker: PreparedSpeaker) -> set[EncodingKey]:
        """Return the keys that a speaker's mode needs. Raises: WorkerRPCError."""
        sha = speaker.ref.audio_sha256
        return {self._key(sha, name) for name in speaker.mode.encoders}

    def _windows(
        self, speakers: Iterable[PreparedSpeaker]
    ) -> Iterator[list[PreparedSpeaker]]:
        """Cut a list into parts that can be stored and queued together.

        A part takes at most half of the budget of inline audio, so that no clip of it
        is evicted before it is encoded. The list is read as the parts are taken.
        """
        window: list[PreparedSpeaker] = []
        audios: set[str] = set()
        num_bytes = 0
        for speaker in speakers:
            sha, clip_bytes = speaker.ref.audio_sha256, 4 * speaker.num_samples
            is_full = (
                len({sha, *audios}) > self._settings.max_waiting_inline
                or num_bytes + clip_bytes > self._settings.inline_audio_max_bytes // 2
            )
            if window and is_full:
                yield window
                window, audios, num_bytes = [], set(), 0
            window.append(speaker)
            audios.add(sha)
            num_bytes += clip_bytes
        if window:
            yield window

    def _ensure(self, speakers: Sequence[PreparedSpeaker]) -> None:
        """Return when all encodings of the speakers exist.

        Raises: EncodeError, EncodeTimeoutError, InvalidAudioError, WorkerRPCError.
        """
        clips = {speaker.ref.audio_sha256: speaker.clip for speaker in speakers}
        keys = set().union(*map(self._keys, speakers))
        wants = {next(self._ids): key for key in keys}
        try:
            self._wait(wants, clips)
        finally:
            # A want that failed, or was given up, must not answer for the next clips.
            self._withdrawn += wants

    def _wait(self, wants: dict[int, EncodingKey], clips: Mapping[str, Path]) -> None:
        """Wait for ``wants`` to end, and remove ended ones; store evicted clips again.

        Raises: As `_ensure`.
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
                    raise errors.EncodeError(
                        f"{clip} was evicted {_MAX_TIMES_STORED} times "
                        "before it was encoded. Raise "
                        "SPEAKER_CACHE_INLINE_AUDIO_MAX_BYTES, or give this job a "
                        "SPEAKER_SAMPLES_DIR of its own."
                    )
                for sha in sorted({key.audio_sha256 for key in lost}):
                    self._store.store_inline(decode_path(clips[sha]))
                wants |= {next(self._ids): key for key in lost}
            elif wants:
                if num_finished != num_ended:
                    num_ended, ended_at = num_finished, time.monotonic()
                if time.monotonic() - ended_at > patience_seconds:
                    raise errors.EncodeTimeoutError(
                        f"{len(wants)} encodings are missing and none was finished "
                        f"within {patience_seconds:g} s."
                    )
                time.sleep(_POLL_SECONDS)

    def _want(
        self, wants: Mapping[int, EncodingKey]
    ) -> tuple[dict[int, JobState], int]:
        """Send wants; return the states of ended ones, and how many encodes ever ended.

        Raises: EncodeError, WorkerRPCError.
        """
        # Wants may be sent again: a worker knows a want by its id.
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
        answers = [a for a in self._workers.call(rpc_client.WANT, call) if a.rank == 0]
        ended: dict[int, list[JobState]] = {}
        reports = itertools.chain.from_iterable(answer.reports for answer in answers)
        for report in (report for report in reports if report.id in wants):
            if report.state in _FAILED:
                raise errors.EncodeError(f"A clip was not encoded: {report.reason}")
            if report.state is not JobState.ENCODING:
                ended.setdefault(report.id, []).append(report.state)
        states = {
            number: max(states, key=lambda state: state is JobState.NO_AUDIO)
            for number, states in ended.items()
            if len(states) == len(answers) or JobState.NO_AUDIO in states
        }
        return states, sum(answer.num_finished for answer in answers)
