"""Ensure, for a batch job: clips are stored, then waited for, some at a time."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_tts_cache.audio.decode import DecodedAudio, decode_path
from vllm_tts_cache.config import Settings
from vllm_tts_cache.errors import EncodeError, EncodeTimeoutError, InvalidAudioError
from vllm_tts_cache.speaker.modes import Mode
from vllm_tts_cache.speaker.ref import SpeakerRef
from vllm_tts_cache.speaker.rpc_client import WANT, SyncWorkers
from vllm_tts_cache.speaker.wire import JobReport, JobState, Want, WantCall
from vllm_tts_cache.store.speaker_store import SpeakerStore

# An RPC takes the worker off decoding; nothing decodes while a list is prepared.
_POLL_SECONDS = 0.05
_LEASE_SECONDS = 10.0
# The store may be shared with a server whose inline clips push these out meanwhile.
_MAX_TIMES_STORED = 5

Need = tuple[str, str]  # address of the audio, name of the encoder


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

    def __init__(
        self,
        workers: SyncWorkers,
        store: SpeakerStore,
        settings: Settings,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._workers = workers
        self._store = store
        self._settings = settings
        self._sleep = sleep

    def windows(
        self, speakers: Iterable[PreparedSpeaker]
    ) -> Iterator[list[PreparedSpeaker]]:
        """Cut a list into parts that can be stored and queued together.

        A part takes at most half of what is kept of inline audio, so that nothing of
        it is evicted before it is encoded. The list is read as the parts are taken.
        """
        window: list[PreparedSpeaker] = []
        keys: set[Need] = set()
        num_bytes = 0
        for speaker in speakers:
            clip_bytes = 4 * speaker.num_samples
            added = keys | self.needs(speaker)
            is_full = (
                len(added) > self._settings.max_waiting_inline
                or num_bytes + clip_bytes > self._settings.inline_audio_max_bytes // 2
            )
            if window and is_full:
                yield window
                window, added, num_bytes = [], self.needs(speaker), 0
            window.append(speaker)
            keys, num_bytes = added, num_bytes + clip_bytes
        if window:
            yield window

    def needs(self, speaker: PreparedSpeaker) -> set[Need]:
        """Return which encodings its mode needs."""
        sha = speaker.ref.audio_sha256
        return {(sha, name) for name in speaker.mode.encoders}

    def ensure(self, speakers: Sequence[PreparedSpeaker]) -> None:
        """Return when all encodings of the speakers exist.

        Raises: EncodeError, EncodeTimeoutError, InvalidAudioError, WorkerRPCError.
        """
        clips = {speaker.ref.audio_sha256: speaker for speaker in speakers}
        missing = set().union(*(self.needs(speaker) for speaker in speakers))
        num_stored = 0
        progress = _Progress(self._settings.encode_timeout_seconds)
        while missing:
            reports, num_finished = self._want(missing)
            missing -= _ready(reports)
            if lost := _lost(reports, clips):
                num_stored += 1
                if num_stored > _MAX_TIMES_STORED:
                    raise EncodeError(_evicted(lost[0]))
                for speaker in lost:
                    self._store.keep_inline(decode_clip(speaker.clip))
            elif missing:
                progress.check(num_finished, len(missing))
                self._sleep(_POLL_SECONDS)

    def _want(self, needs: set[Need]) -> tuple[list[JobReport], int]:
        wants = [
            Want(audio_sha256=sha, encoder=name, segment="inline", urgent=False)
            for sha, name in sorted(needs)
        ]
        call = WantCall(wants=wants, lease_seconds=_LEASE_SECONDS)
        # The other ranks load what rank 0 publishes.
        answers = [a for a in self._workers.call(WANT, call) if a.rank == 0]
        reports = [report for answer in answers for report in answer.reports]
        for report in reports:
            if report.state is JobState.FAILED:
                raise EncodeError(
                    f"{report.audio_sha256} was not encoded: {report.reason}"
                )
        return reports, sum(answer.num_finished for answer in answers)


class _Progress:
    """Ends the waiting when nothing is finished for too long."""

    def __init__(self, patience_seconds: float):
        self._patience_seconds = patience_seconds
        self._num_finished = -1
        self._since = time.monotonic()

    def check(self, num_finished: int, num_missing: int) -> None:
        now = time.monotonic()
        if num_finished != self._num_finished:
            self._num_finished, self._since = num_finished, now
        if now - self._since > self._patience_seconds:
            raise EncodeTimeoutError(
                f"{num_missing} encodings are missing and none was finished within "
                f"{self._patience_seconds:g} s."
            )


def decode_clip(clip: Path) -> DecodedAudio:
    """Decode a clip; the error names its file. Raises: InvalidAudioError."""
    try:
        return decode_path(clip)
    except InvalidAudioError as exc:
        if str(clip) in exc.reason:
            raise
        raise InvalidAudioError(f"{clip}: {exc.reason}") from exc


def _ready(reports: Iterable[JobReport]) -> set[Need]:
    return {(r.audio_sha256, r.encoder) for r in reports if r.state is JobState.READY}


def _lost(
    reports: Iterable[JobReport], clips: dict[str, PreparedSpeaker]
) -> list[PreparedSpeaker]:
    lost = {r.audio_sha256 for r in reports if r.state is JobState.NO_AUDIO}
    return [clips[sha] for sha in sorted(lost)]


def _evicted(speaker: PreparedSpeaker) -> str:
    return (
        f"{speaker.clip} was evicted {_MAX_TIMES_STORED} times before it was encoded. "
        "Raise SPEAKER_CACHE_INLINE_AUDIO_MAX_BYTES, or give this job a "
        "SPEAKER_SAMPLES_DIR of its own."
    )
