"""The worker RPC of an ``Omni`` engine: every answer is checked."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from vllm_tts_cache.entrypoints.workers import (
    TALKER_STAGE,
    TIMEOUT_SECONDS,
    checked_answers,
    encoding_of,
)
from vllm_tts_cache.errors import EncodeError
from vllm_tts_cache.speaker.ref import SpeakerRef
from vllm_tts_cache.store.encoding import Encoding
from vllm_tts_cache.store.keys import EncodingKey


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
        num_samples: At its own rate.
        sample_rate_hz: Of the clip.
    """

    ref: SpeakerRef
    ref_text: str | None
    num_samples: int
    sample_rate_hz: int


class OfflineWorkers:
    """The workers of the stage that prefills."""

    def __init__(self, engine: OfflineEngine):
        self._engine = engine

    def call(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """Call one of ``model_executor.rpc``; returns each worker's answer.

        Raises: WorkerRPCError.
        """
        results = self._engine.collective_rpc(
            method, timeout=TIMEOUT_SECONDS, args=args, stage_ids=[TALKER_STAGE]
        )
        return checked_answers(method, results)

    def missing(self, needed: set[tuple[str, str]]) -> set[tuple[str, str]]:
        """Return which of these (audio, encoder name) pairs are not encoded yet.

        Raises: EncodeError if one failed; WorkerRPCError.
        """
        shas = sorted({sha for sha, _ in needed})
        answers = self.call("tts_cache_states", shas) if shas else []
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

    def encoding(self, ref: SpeakerRef, name: str) -> tuple[EncodingKey, Encoding]:
        """Return one encoding of a prepared speaker, and its key.

        Raises: EncodeError if it is not there (any more); WorkerRPCError.
        """
        key = EncodingKey(
            audio_sha256=ref.audio_sha256, encoder_fingerprint=self._fingerprints[name]
        )
        answers = self.call("tts_cache_encoding", ref.audio_sha256, name)
        return key, encoding_of(answers, key)

    @cached_property
    def _fingerprints(self) -> dict[str, str]:
        return dict(self.call("tts_cache_describe")[0]["fingerprints"])
