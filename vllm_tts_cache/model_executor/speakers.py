"""A worker's speakers: its reference encoders, its cache, its encode thread."""

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent import futures
from typing import Any

import torch

from vllm_tts_cache.catalogue.segment import Segment
from vllm_tts_cache.errors import EncodeError, EncodeTimeoutError
from vllm_tts_cache.model_executor.encode_queue import EncodeJob, EncodeQueue
from vllm_tts_cache.speaker.family import ReferenceEncoder
from vllm_tts_cache.speaker.ref import SpeakerRef
from vllm_tts_cache.store import serde
from vllm_tts_cache.store.audio_store import AudioStore
from vllm_tts_cache.store.cache import EncodingCache
from vllm_tts_cache.store.encoding import Encoding
from vllm_tts_cache.store.keys import EncodingKey

logger = logging.getLogger("vllm.vllm_tts_cache")


class WorkerSpeakers:
    """What a talker asks for speaker prompts, and what the worker RPC talks to."""

    def __init__(
        self,
        *,
        encoders: Mapping[str, ReferenceEncoder],
        cache: EncodingCache,
        audio: AudioStore,
        device: torch.device,
        encode_timeout_seconds: float,
        encode_yield_seconds: float,
    ):
        self._encoders = encoders
        self._cache = cache
        self._audio = audio
        self._timeout_seconds = encode_timeout_seconds
        self._queue = EncodeQueue(
            self._encode, device, yield_seconds=encode_yield_seconds
        )
        self._republishing = threading.Lock()
        self._num_encodes: Counter[str] = Counter()
        self._num_in_place = 0
        self._num_prompts = 0
        self._num_failed_prompts = 0

    @property
    def fingerprints(self) -> dict[str, str]:
        """Encoder name -> fingerprint."""
        return {name: e.fingerprint for name, e in self._encoders.items()}

    def prepare(
        self, ref: SpeakerRef, encoder_names: Iterable[str], *, encodes: bool
    ) -> dict[str, str]:
        """Start what is missing; returns each encoder's state at once.

        ``encodes`` is False on ranks that only load what rank 0 publishes.
        """
        states = {}
        for name in encoder_names:
            job = self._job(ref, name)
            if encodes and not self._cache.is_durable(job.key):
                self._queue.submit(job)
            states[name] = self.state(job.key)
        return states

    def state(self, key: EncodingKey) -> str:
        """``ready``, ``processing``, ``pending``, or ``failed: <reason>``."""
        if self._queue.in_flight(key):
            return "processing"
        if self._cache.contains(key):
            return "ready"
        failure = self._queue.failure(key)
        return "pending" if failure is None else f"failed: {failure}"

    def states(self, audio_sha256: str) -> dict[str, str]:
        """Each encoder's state for one audio."""
        return {
            name: self.state(self._key(audio_sha256, name)) for name in self._encoders
        }

    def prompt(
        self, ref: SpeakerRef, encoder_names: Iterable[str]
    ) -> dict[str, Encoding]:
        """Return the encodings a prefill needs: memory, disk, or encoded in place.

        Raises:
            EncodeError: It cannot be had; the message says why.
            EncodeTimeoutError: It took too long; it may still be under way.
        """
        return {name: self._encoding(ref, name) for name in encoder_names}

    def count_prompt(self) -> None:
        """Count a request that got its speaker prompt, from here or from its KV."""
        self._num_prompts += 1

    def stored_encoding(self, audio_sha256: str, encoder_name: str) -> bytes | None:
        """Return an encoding in its stored form; None if no tier has it."""
        key = self._key(audio_sha256, encoder_name)
        # Whose it is does not matter here, and an inline one pushes nobody out.
        found = self._cache.get(key, Segment.INLINE)
        return None if found is None else serde.encode(key, found)

    def count_failed_prompt(self) -> None:
        """Count a request that failed because its speaker prompt could not be had."""
        self._num_failed_prompts += 1

    def forget(self, audio_sha256s: Iterable[str]) -> int:
        """Drop the audios' encodings from every tier; returns how many there were."""
        with self._republishing:
            return sum(self._cache.forget(sha) for sha in audio_sha256s)

    def stats(self) -> dict[str, Any]:
        """Counters and sizes as plain data."""
        return {
            **self._cache.stats(),
            "encodes": {name: self._num_encodes[name] for name in self._encoders},
            "in_place_encodes": self._num_in_place,
            "prompts": self._num_prompts,
            "failed_prompts": self._num_failed_prompts,
            "in_flight": self._queue.num_in_flight,
        }

    def _encoding(self, ref: SpeakerRef, name: str) -> Encoding:
        job = self._job(ref, name)
        if (found := self._cache.get(job.key, ref.segment)) is not None:
            return found
        # The request path waits for `ensure`, so on a healthy server nothing comes
        # here. The same thread encodes, so that bits cannot depend on the path.
        self._num_in_place += 1
        logger.warning("Encoding %s of %s in place.", name, ref.audio_sha256)
        # The future has it even where no tier had room or a disk to keep it.
        return self._await(self._queue.submit(job), job)

    def _await(self, flight: "futures.Future[Encoding]", job: EncodeJob) -> Encoding:
        try:
            return flight.result(self._timeout_seconds)
        except futures.TimeoutError as exc:
            raise EncodeTimeoutError(
                f"{job.encoder_name} of {job.key.audio_sha256} was not encoded within "
                f"{self._timeout_seconds:g} s"
            ) from exc

    def _encode(self, job: EncodeJob) -> Encoding:
        if (found := self._republish(job)) is not None:
            return found
        return self._cache.get_or_encode(
            job.key, job.segment, lambda: self._compute(job)
        )

    def _republish(self, job: EncodeJob) -> Encoding | None:
        """Write again what memory has and somebody removed from disk; None on a miss.

        Under a lock that `forget` takes too: what is forgotten between the look and
        the write must not come back.
        """
        with self._republishing:
            if not self._cache.contains(job.key):
                return None
            if (found := self._cache.get(job.key, job.segment)) is not None:
                self._cache.put(job.key, found, job.segment)
            return found

    def _compute(self, job: EncodeJob) -> Encoding:
        audio = self._audio.get(job.key.audio_sha256)
        if audio is None:
            raise EncodeError("its reference audio is not stored (any more)")
        encoding = self._encoders[job.encoder_name].encode(audio)
        self._num_encodes[job.encoder_name] += 1
        return encoding

    def _job(self, ref: SpeakerRef, name: str) -> EncodeJob:
        key = self._key(ref.audio_sha256, name)
        return EncodeJob(key=key, encoder_name=name, segment=Segment(ref.segment))

    def _key(self, audio_sha256: str, name: str) -> EncodingKey:
        fingerprint = self._encoders[name].fingerprint
        return EncodingKey(audio_sha256=audio_sha256, encoder_fingerprint=fingerprint)
