"""What churns in the scenario ``churn``: a server's speaker side without the server."""

import asyncio
import contextlib
import random
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.in_process import RepeatingEncoder, noise, worker_speakers
from vllm_tts_cache.catalogue.record import NewSpeaker
from vllm_tts_cache.catalogue.segment import Segment
from vllm_tts_cache.config import Settings
from vllm_tts_cache.entrypoints.running import RunningRequests
from vllm_tts_cache.entrypoints.storage import open_storage
from vllm_tts_cache.errors import EncodeError
from vllm_tts_cache.speaker.ref import SpeakerRef
from vllm_tts_cache.store.flights import FileFlights
from vllm_tts_cache.store.wiring import open_cache

NUM_AT_ONCE = 8
NUM_CLIPS = 1_200  # fewer than registrations: names share clips, inline ones too
NUM_NAMES = 800  # so some registrations replace a voice
MIN_VOICES = 600  # more than fit into memory
POLL_SECONDS = 0.002
# Room for the voices, and not for all inline clips: there the disk evicts too.
DISK_MAX_BYTES = 128 * 1024**2
ENCODERS = (RepeatingEncoder("speaker", 2_048), RepeatingEncoder("codec", 30_720))
NAMES = tuple(encoder.name for encoder in ENCODERS)


class Churn:
    """A server's speaker side without the server."""

    def __init__(self, directory: Path, memory_max_bytes: int, seed: int):
        settings = Settings(
            samples_dir=directory,
            memory_max_bytes=memory_max_bytes,
            memory_max_entries=1_000_000,  # bytes shall bind
            disk_max_bytes=DISK_MAX_BYTES,
            inline_audio_max_bytes=32 * 1024**2,
            max_uploaded=0,
            encode_yield_seconds=0.02,  # there is no decoding to give way to
        )
        self.storage = open_storage(settings)
        self.cache = open_cache(settings)
        self.worker = worker_speakers(settings, self.cache, ENCODERS)
        self.running = RunningRequests()
        self._random = random.Random(seed)
        self._locks = directory / "locks"
        self.names: set[str] = set()
        self.num_retried = 0

    async def operate(self) -> None:
        """One operation; speaks most often, deletes once there are many voices."""
        kinds, weights = [self._register, self._inline], [10, 10]
        if self.names:
            kinds.append(self._speak)
            weights.append(72)
        if len(self.names) >= MIN_VOICES:
            kinds.append(self._delete)
            weights.append(8)
        (kind,) = self._random.choices(kinds, weights)
        await kind()

    async def _register(self) -> None:
        name = f"voice {self._random.randrange(NUM_NAMES)}"
        audio = noise(self._random.randrange(NUM_CLIPS))
        new = NewSpeaker(
            name=name,
            consent="consent-1",
            audio_sha256=audio.audio_sha256,
            num_samples=audio.num_samples,
            sample_rate_hz=audio.sample_rate_hz,
        )
        done = await asyncio.to_thread(self.storage.register, new, audio)
        self.names.add(name)
        self.worker.prepare(_ref(audio.audio_sha256), NAMES, encodes=True)
        if done.replaced is not None:
            await self._release(done.replaced.audio_sha256)

    async def _speak(self) -> None:
        name = self._random.choice(sorted(self.names))
        await self._with_retry(lambda: self._registered_clip(name))

    async def _inline(self) -> None:
        seed = self._random.randrange(NUM_CLIPS)
        await self._with_retry(lambda: self._inline_clip(seed))

    async def delete(self, name: str) -> None:
        self.names.discard(name)
        record = await asyncio.to_thread(self.storage.registry.delete, name)
        if record is not None:
            await self._release(record.audio_sha256)

    async def _delete(self) -> None:
        await self.delete(self._random.choice(sorted(self.names)))

    async def _release(self, sha: str | None) -> None:
        assert sha is not None
        await self.running.drained(sha)
        if await asyncio.to_thread(self.storage.release, sha):
            await asyncio.to_thread(self.worker.forget, [sha])

    async def _registered_clip(self, name: str) -> SpeakerRef | None:
        record = await asyncio.to_thread(self.storage.registry.get, name)
        if record is None or record.audio_sha256 is None:
            return None
        return _ref(record.audio_sha256)

    async def _inline_clip(self, seed: int) -> SpeakerRef:
        audio = noise(seed)
        await asyncio.to_thread(self.storage.audio.put, audio, Segment.INLINE)
        return _ref(audio.audio_sha256, Segment.INLINE)

    async def _with_retry(
        self, resolve: Callable[[], Awaitable[SpeakerRef | None]]
    ) -> None:
        """Prompt as a request does: looked up again if it went away meanwhile."""
        if (ref := await resolve()) is None:
            return
        try:
            await self._prompt(ref)
        except EncodeError:
            self.num_retried += 1
            if (now := await resolve()) is not None:
                await self._prompt(now)

    async def _prompt(self, ref: SpeakerRef) -> None:
        """Ensure, then prefill; raises EncodeError if the audio went away."""
        self.running.enter(ref.audio_sha256)
        try:
            await self._ensure(ref)
            found = await asyncio.to_thread(self.worker.prompt, ref, NAMES)
        finally:
            self.running.leave(ref.audio_sha256)
        speaker, codec = (found[name]["values"] for name in NAMES)
        assert np.array_equal(speaker[:64], codec[:64]), "encodings of two clips"

    async def _ensure(self, ref: SpeakerRef) -> None:
        while (
            states := set(self.worker.prepare(ref, NAMES, encodes=True).values())
        ) != {"ready"}:
            if failed := [state for state in states if state.startswith("failed")]:
                raise EncodeError(failed[0])
            await asyncio.sleep(POLL_SECONDS)

    def memory_bytes(self) -> int:
        """Bytes of all arrays in memory, by adding them up."""
        memory: Any = self.cache._tiers[0]
        with memory._lock:
            return sum(
                array.nbytes
                for shelf in (memory._registered, memory._inline)
                for encoding in shelf.entries.values()
                for array in encoding.arrays.values()
            )

    def _num_registered_in_memory(self) -> int:
        memory, _ = self.cache.snapshot().tiers
        return memory.segments[Segment.REGISTERED].entries

    def open_connections(self) -> None:
        """As many as can be in use at once: one that is opened later is no leak."""
        database = self.storage.registry._database
        with contextlib.ExitStack() as all_at_once:
            for _ in range(NUM_AT_ONCE):
                all_at_once.enter_context(database.read())

    def left(self) -> dict[str, int]:
        """What is still there, after every voice was deleted."""
        found = self.storage.verify()
        for problem in found[:10]:
            print(problem, file=sys.stderr)
        encodings = self.storage.directory / "encodings" / "v1" / "registered"
        num_locks = len(list(self._locks.iterdir()))
        return {
            "problems that verify finds": len(found),
            "rows": self.storage.registry.count(),
            "registered audio files": len(list(self.storage.audio.iter_registered())),
            "registered encoding files": len(list(encodings.rglob("*.safetensors"))),
            "registered encodings in memory": self._num_registered_in_memory(),
            "flights": self.worker.stats()["in_flight"]
            + self.cache.stats()["in_flight"],
            "pins": len(self.running._counts),
            "lock files above one a stripe": max(
                0, num_locks - FileFlights.NUM_STRIPES
            ),
        }


def _ref(sha: str, segment: Segment = Segment.REGISTERED) -> SpeakerRef:
    return SpeakerRef(audio_sha256=sha, segment=segment)
