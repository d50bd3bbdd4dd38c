"""Voices for a batch job without a server: ``OfflineSpeakers(Omni(...))``.

The worker encodes in the background, on the same storage as a server; what a server
has encoded is not encoded again, nor the other way round.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from vllm.inputs import tokens_input

from vllm_tts_cache.audio.decode import decode_path
from vllm_tts_cache.audio.segment import Segment
from vllm_tts_cache.audio.wiring import open_audio
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.entrypoints.workers import (
    TALKER_STAGE,
    TIMEOUT_SECONDS,
    checked_answers,
)
from vllm_tts_cache.errors import (
    ConfigError,
    EncodeError,
    EncodeTimeoutError,
    InvalidAudioError,
)
from vllm_tts_cache.families.base import CloneMode
from vllm_tts_cache.families.qwen3_tts import FAMILY
from vllm_tts_cache.families.qwen3_tts.frames import num_codec_frames
from vllm_tts_cache.families.speaker_ref import FIELD, SpeakerRef

# An RPC takes the worker off decoding; nothing decodes while a list is prepared.
_POLL_SECONDS = 0.05


class OfflineEngine(Protocol):
    """``vllm_omni.entrypoints.omni.Omni``, with the method that the plugin gives it."""

    @property
    def model(self) -> Any:
        """The checkpoint: a folder, or a Hugging Face id."""
        ...

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        stage_ids: list[int] | None = None,
    ) -> list[Any]:
        """Call ``method`` on every worker of the stages: a list per replica."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedSpeaker:
    """A clip whose encodings exist.

    Attributes:
        ref: Its content address.
        ref_text: What is said in it; None for an x-vector clone.
        num_frames: Codec frames, which an in-context prompt's length depends on.
    """

    ref: SpeakerRef
    ref_text: str | None
    num_frames: int

    @property
    def mode(self) -> CloneMode:
        """In-context with a transcript, x-vector without."""
        return CloneMode.of(in_context=self.ref_text is not None)

    def additional_information(
        self, text: str, *, language: str = "Auto"
    ) -> dict[str, list[Any]]:
        """What a prompt that speaks ``text`` carries beside its token ids."""
        information: dict[str, list[Any]] = {
            "task_type": ["Base"],
            "text": [text],
            "language": [language],
            "instruct": [""],
            "x_vector_only_mode": [self.ref_text is None],
            FIELD: [*self.ref.to_wire()],
        }
        if self.ref_text is not None:
            information["ref_text"] = [self.ref_text]
            information["ref_code_length"] = [self.num_frames]
        return information


class OfflineSpeakers:
    """Prepares voices in an ``Omni`` engine and builds the prompts that name them.

    Raises:
        ConfigError: A setting is wrong.
    """

    def __init__(self, omni: OfflineEngine):
        self._engine = omni
        self._model = str(omni.model)
        self._settings = load_settings()
        self._audio = open_audio(self._settings)

    def prepare(
        self, clips: Sequence[Path], ref_texts: Sequence[str | None] | None = None
    ) -> list[PreparedSpeaker]:
        """Store the clips and return when all their encodings exist.

        Args:
            clips: Audio files; one that was prepared before costs its decoding only.
            ref_texts: For each clip what is said in it, or None for an x-vector clone.

        Raises:
            ConfigError: There are not as many transcripts as clips.
            InvalidAudioError: A clip cannot be used; the message names it.
            EncodeError: An encoder failed.
            EncodeTimeoutError: No encoding was finished for as long as a request may
                wait for one (``SPEAKER_CACHE_ENCODE_TIMEOUT_SECONDS``).
            WorkerRPCError: The worker could not be asked, or clones no voices.
        """
        if ref_texts is None:
            ref_texts = [None] * len(clips)
        if len(ref_texts) != len(clips):
            raise ConfigError(f"{len(clips)} clips have {len(ref_texts)} transcripts")
        speakers = [
            self._stored(clip, ref_text)
            for clip, ref_text in zip(clips, ref_texts, strict=True)
        ]
        for mode in CloneMode:
            wires = [s.ref.to_wire() for s in speakers if s.mode is mode]
            if wires:
                self._call("tts_cache_prepare", wires, list(FAMILY.encoders[mode]))
        self._wait(speakers)
        return speakers

    def prompt(
        self, speaker: PreparedSpeaker, text: str, *, language: str = "Auto"
    ) -> dict[str, Any]:
        """Build a prompt for ``Omni.generate``: real length, no waveform."""
        information = speaker.additional_information(text, language=language)
        num_tokens = self._prompt_length(information)
        prompt: dict[str, Any] = {**tokens_input(prompt_token_ids=[1] * num_tokens)}
        prompt["additional_information"] = information
        # The ids are placeholders: without a salt all prompts would share a prefix.
        canonical = json.dumps(information, sort_keys=True)
        prompt["cache_salt"] = hashlib.sha256(canonical.encode()).hexdigest()
        return prompt

    def stats(self) -> list[dict[str, Any]]:
        """Each worker's counters and sizes.

        Raises: WorkerRPCError.
        """
        return self._call("tts_cache_stats")

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
            ref_text=(ref_text or "").strip() or None,
            num_frames=num_codec_frames(audio.num_samples, audio.sample_rate_hz),
        )

    def _wait(self, speakers: Iterable[PreparedSpeaker]) -> None:
        needed = {
            (speaker.ref.audio_sha256, name)
            for speaker in speakers
            for name in FAMILY.encoders[speaker.mode]
        }
        patience = self._settings.encode_timeout_seconds
        deadline = time.monotonic() + patience
        while missing := self._missing(needed):
            if len(missing) < len(needed):
                deadline = time.monotonic() + patience
                needed = missing
            if time.monotonic() > deadline:
                raise EncodeTimeoutError(
                    f"{len(missing)} encodings are missing and none was finished "
                    f"within {patience:g} s."
                )
            time.sleep(_POLL_SECONDS)

    def _missing(self, needed: set[tuple[str, str]]) -> set[tuple[str, str]]:
        shas = sorted({sha for sha, _ in needed})
        answers = self._call("tts_cache_states", shas) if shas else []
        missing: set[tuple[str, str]] = set()
        for answer in answers:
            if answer["rank"] != 0:  # the others load what rank 0 publishes
                continue
            for sha, name in needed:
                state = answer["states"][sha][name]
                if state.startswith("failed: "):
                    raise EncodeError(f"{sha} was not encoded: {state[8:]}")
                if state != "ready":
                    missing.add((sha, name))
        return missing

    def _call(self, method: str, *args: Any) -> list[dict[str, Any]]:
        results = self._engine.collective_rpc(
            method, timeout=TIMEOUT_SECONDS, args=args, stage_ids=[TALKER_STAGE]
        )
        return checked_answers(method, results)

    def _prompt_length(self, information: dict[str, list[Any]]) -> int:
        from vllm_omni.model_executor.models.qwen3_tts.prompt_embeds_builder import (
            Qwen3TTSPromptEmbedsBuilder,
        )

        estimate = (
            Qwen3TTSPromptEmbedsBuilder.estimate_prompt_len_from_additional_information
        )
        return estimate(
            additional_information=information,
            task_type="Base",
            tokenize_prompt=lambda text: self._tokenizer(text, padding=False).input_ids,
            codec_language_id=self._talker_config.get("codec_language_id"),
            spk_is_dialect=self._talker_config.get("spk_is_dialect"),
        )

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._model, padding_side="left")

    @cached_property
    def _talker_config(self) -> Mapping[str, Any]:
        from transformers.utils.hub import cached_file

        path = cached_file(self._model, "config.json")
        assert path is not None  # it raises where the file is missing
        return json.loads(Path(path).read_text())["talker_config"]
