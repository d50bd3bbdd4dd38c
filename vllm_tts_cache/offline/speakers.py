"""Prepares voices in an ``Omni`` engine and builds the prompts that name them."""

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from vllm_tts_cache.audio.decode import decode_path
from vllm_tts_cache.catalogue.segment import Segment
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.errors import (
    ConfigError,
    EncodeTimeoutError,
    InvalidAudioError,
)
from vllm_tts_cache.offline.fish_speech import FishSpeechPrompts
from vllm_tts_cache.offline.qwen3_tts import Qwen3TTSPrompts
from vllm_tts_cache.offline.workers import (
    OfflineEngine,
    OfflineWorkers,
    PreparedSpeaker,
)
from vllm_tts_cache.speaker.family import CloneMode, Family
from vllm_tts_cache.speaker.ref import SpeakerRef
from vllm_tts_cache.store.audio_wiring import open_audio

# An RPC takes the worker off decoding; nothing decodes while a list is prepared.
_POLL_SECONDS = 0.05


class Prompts(Protocol):
    """Builds one family's prompts."""

    @property
    def family(self) -> Family:
        """Whose prompts."""
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
    """

    def __init__(self, omni: OfflineEngine):
        self._workers = OfflineWorkers(omni)
        self._prompts = _prompts(str(omni.model), self._workers)
        self._settings = load_settings()
        self._audio = open_audio(self._settings)

    def prepare(
        self, clips: Sequence[Path], ref_texts: Sequence[str | None] | None = None
    ) -> list[PreparedSpeaker]:
        """Store the clips and return when all their encodings exist.

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
            WorkerRPCError: The worker could not be asked, or clones no voices.
        """
        transcripts = self._transcripts(clips, ref_texts)
        speakers = [
            self._stored(clip, transcript)
            for clip, transcript in zip(clips, transcripts, strict=True)
        ]
        for mode in CloneMode:
            wires = [s.ref.to_wire() for s in speakers if _mode(s) is mode]
            if wires:
                names = list(self._prompts.family.encoders[mode])
                self._workers.call("tts_cache_prepare", wires, names)
        self._wait(speakers)
        return speakers

    def prompt(
        self, speaker: PreparedSpeaker, text: str, *, language: str = "Auto"
    ) -> dict[str, Any]:
        """Build a prompt for ``Omni.generate``: no waveform.

        Raises: InvalidSpeakerError if the text cannot be spoken; EncodeError,
            WorkerRPCError.
        """
        return self._prompts.prompt(speaker, text, language)

    def stats(self) -> list[dict[str, Any]]:
        """Each worker's counters and sizes.

        Raises: WorkerRPCError.
        """
        return self._workers.call("tts_cache_stats")

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

    def _stored(self, clip: Path, ref_text: str | None) -> PreparedSpeaker:
        try:
            audio = decode_path(clip).audio
        except InvalidAudioError as exc:
            named = str(clip) in exc.reason
            reason = exc.reason if named else f"{clip}: {exc.reason}"
            raise InvalidAudioError(reason) from exc
        self._audio.put(audio, Segment.INLINE)
        return PreparedSpeaker(
            ref=SpeakerRef(audio_sha256=audio.audio_sha256, segment=Segment.INLINE),
            ref_text=ref_text,
            num_samples=audio.num_samples,
            sample_rate_hz=audio.sample_rate_hz,
        )

    def _wait(self, speakers: Iterable[PreparedSpeaker]) -> None:
        needed = {
            (speaker.ref.audio_sha256, name)
            for speaker in speakers
            for name in self._prompts.family.encoders[_mode(speaker)]
        }
        patience = self._settings.encode_timeout_seconds
        deadline = time.monotonic() + patience
        while missing := self._workers.missing(needed):
            if len(missing) < len(needed):
                deadline = time.monotonic() + patience
                needed = missing
            if time.monotonic() > deadline:
                raise EncodeTimeoutError(
                    f"{len(missing)} encodings are missing and none was finished "
                    f"within {patience:g} s."
                )
            time.sleep(_POLL_SECONDS)


def _mode(speaker: PreparedSpeaker) -> CloneMode:
    return CloneMode.of(in_context=speaker.ref_text is not None)


def _prompts(model: str, workers: OfflineWorkers) -> Prompts:
    from transformers.utils.hub import cached_file

    path = cached_file(model, "config.json")
    assert path is not None  # it raises where the file is missing
    config = json.loads(Path(path).read_text())
    match config.get("model_type"):
        case "qwen3_tts":
            return Qwen3TTSPrompts(model, config)
        case "fish_qwen3_omni":
            return FishSpeechPrompts(model, config, workers)
        case other:
            raise ConfigError(
                f"{model}: model_type is {other!r}; known are 'qwen3_tts' and "
                "'fish_qwen3_omni'"
            )
