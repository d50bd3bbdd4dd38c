"""Ensure: the one way an encoding comes to be, seen from the API process."""

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from vllm_tts_cache.entrypoints.quick_looks import QuickLooks
from vllm_tts_cache.entrypoints.workers import Workers
from vllm_tts_cache.errors import EncodeError, EncodeTimeoutError, StorageError
from vllm_tts_cache.speaker.ref import SpeakerRef
from vllm_tts_cache.store.keys import EncodingKey, Segment
from vllm_tts_cache.store.tiers.disk import DiskTier

logger = logging.getLogger("vllm.vllm_tts_cache")

CacheStatus = Literal["pending", "processing", "ready", "failed"]

# Looking at a file costs nobody anything; asking a worker takes it off decoding for
# half a millisecond. So the disk is asked often, and the worker for what the disk
# cannot tell: a failure, or a full disk.
_DISK_POLL_SECONDS = (0.005, 0.05)
_WORKER_POLL_SECONDS = (0.05, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingNeed:
    """What a mode needs of one reference audio."""

    ref: SpeakerRef
    encoder_names: tuple[str, ...]


class Ensurer:
    """Makes encodings exist, one flight per need, whoever asks and whoever leaves."""

    def __init__(self, workers: Workers, disk: DiskTier, timeout_seconds: float):
        self._workers = workers
        self._disk = disk
        self._timeout_seconds = timeout_seconds
        self._fingerprints: dict[str, str] | None = None
        self._flights: dict[EncodingNeed, asyncio.Task[None]] = {}
        self._looks = QuickLooks()

    async def fingerprints(self) -> dict[str, str]:
        """Encoder name -> fingerprint, asked of the workers once.

        Raises: WorkerRPCError if they cannot say, or do not agree.
        """
        if self._fingerprints is None:
            answers = await self._workers.call("tts_cache_describe")
            found = [answer["fingerprints"] for answer in answers]
            if any(other != found[0] for other in found):
                raise EncodeError("the workers have loaded different encoders")
            self._fingerprints = dict(found[0])
        return self._fingerprints

    async def is_ready(self, need: EncodingNeed) -> bool:
        """Tell whether everything is on disk: one file's status an encoding.

        Nothing is remembered: what is removed meanwhile is encoded again.
        """
        keys = await self.keys(need)
        return await self._looks.run(lambda: all(map(self._is_on_disk, keys)))

    async def ensure(self, need: EncodingNeed) -> bool:
        """Return when the encodings exist; True if they already did.

        A caller that goes away does not cancel the flight.

        Raises:
            EncodeError: An encoder failed; the next call tries again.
            EncodeTimeoutError: It took too long; it may still be under way.
            WorkerRPCError: The workers could not be asked.
        """
        if await self.is_ready(need):
            return True
        await asyncio.shield(self.start(need))
        return False

    def start(self, need: EncodingNeed) -> "asyncio.Task[None]":
        """Start a flight, or join the one that is under way."""
        if (flight := self._flights.get(need)) is None:
            flight = asyncio.create_task(self._fly(need))
            self._flights[need] = flight
            flight.add_done_callback(lambda task: self._land(need, task))
        return flight

    async def status(self, need: EncodingNeed) -> tuple[CacheStatus, str | None]:
        """Derive the status and, of ``failed``, the reason."""
        if await self.is_ready(need):
            return "ready", None
        if need in self._flights:
            return "processing", None
        states = await self._worker_states(need)
        if states and all(state == "ready" for state in states):
            return "ready", None
        if "processing" in states:
            return "processing", None
        if (failure := _first_failure(states)) is not None:
            return "failed", failure
        return "pending", None

    @property
    def num_flights(self) -> int:
        """Flights under way in this process."""
        return len(self._flights)

    def _is_on_disk(self, key: EncodingKey) -> bool:
        try:
            return self._disk.contains(key)
        except StorageError as exc:  # a broken tier costs time, never a request
            logger.warning("Looking for an encoding on disk: %s", exc)
            return False

    def _land(self, need: EncodingNeed, flight: "asyncio.Task[None]") -> None:
        self._flights.pop(need, None)
        # Also marks the exception as seen: nobody may have waited for it.
        if not flight.cancelled() and (error := flight.exception()) is not None:
            logger.warning("Encoding %s: %s", need.ref.audio_sha256, error)

    async def _fly(self, need: EncodingNeed) -> None:
        deadline = time.monotonic() + self._timeout_seconds
        await self._prepare(need)
        patience, longest = _WORKER_POLL_SECONDS
        while not await self._is_ready_within(need, patience):
            patience = min(2 * patience, longest)
            states = await self._worker_states(need)
            if states and all(state == "ready" for state in states):
                return  # in memory only: the disk does not take it
            if (failure := _first_failure(states)) is not None:
                raise EncodeError(f"The reference audio was not encoded: {failure}")
            if "pending" in states:  # forgotten meanwhile
                await self._prepare(need)
            if time.monotonic() > deadline:
                raise EncodeTimeoutError(
                    "The reference audio was not encoded within "
                    f"{self._timeout_seconds:g} s; it may still be under way. Try "
                    "again, or raise SPEAKER_CACHE_ENCODE_TIMEOUT_SECONDS."
                )

    async def _prepare(self, need: EncodingNeed) -> None:
        wire, names = need.ref.to_wire(), list(need.encoder_names)
        await self._workers.call("tts_cache_prepare", [wire], names)

    async def _is_ready_within(self, need: EncodingNeed, seconds: float) -> bool:
        pause, longest = _DISK_POLL_SECONDS
        until = time.monotonic() + seconds
        while not (ready := await self.is_ready(need)) and time.monotonic() < until:
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)
        return ready

    async def _worker_states(self, need: EncodingNeed) -> list[str]:
        # Only rank 0 encodes; the others learn of it from the disk.
        sha = need.ref.audio_sha256
        answers = await self._workers.call("tts_cache_states", [sha])
        return [
            answer["states"][sha][name]
            for answer in answers
            if answer["rank"] == 0
            for name in need.encoder_names
        ]

    async def keys(self, need: EncodingNeed) -> list[EncodingKey]:
        """Return the keys under which the workers' encoders keep the encodings.

        Raises: WorkerRPCError.
        """
        fingerprints = await self.fingerprints()
        return [
            EncodingKey(
                audio_sha256=need.ref.audio_sha256,
                encoder_fingerprint=fingerprints[name],
            )
            for name in need.encoder_names
        ]


def need_of(
    audio_sha256: str, segment: Segment, encoder_names: Iterable[str]
) -> EncodingNeed:
    """Put a need together."""
    ref = SpeakerRef(audio_sha256=audio_sha256, segment=segment)
    return EncodingNeed(ref=ref, encoder_names=tuple(encoder_names))


def _first_failure(states: list[str]) -> str | None:
    failures = (s.removeprefix("failed: ") for s in states if s.startswith("failed: "))
    return next(failures, None)
