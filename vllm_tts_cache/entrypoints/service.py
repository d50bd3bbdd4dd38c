"""Registering, finding and deleting speakers: what the voices routes call."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from vllm_tts_cache.audio.decode import AudioWarning, decode
from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.catalogue.record import NewSpeaker, SpeakerRecord
from vllm_tts_cache.catalogue.segment import Segment
from vllm_tts_cache.entrypoints.encoding_source import EncodingSource
from vllm_tts_cache.entrypoints.ensure import (
    CacheStatus,
    EncodingNeed,
    Ensurer,
    need_of,
)
from vllm_tts_cache.entrypoints.prompt_memory import PromptMemory
from vllm_tts_cache.entrypoints.quick_looks import QuickLooks
from vllm_tts_cache.entrypoints.running import RunningRequests
from vllm_tts_cache.entrypoints.storage import Storage
from vllm_tts_cache.entrypoints.workers import UnsupportedModelError, Workers
from vllm_tts_cache.errors import SpeakerNotFoundError, StorageError, TTSCacheError
from vllm_tts_cache.speaker.family import Family

logger = logging.getLogger("vllm.vllm_tts_cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """The fields of a registration that do not depend on the kind of sample."""

    name: str
    consent: str
    ref_text: str | None = None
    description: str | None = None
    mime_type: str | None = None
    original_filename: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What registering answers."""

    record: SpeakerRecord
    warnings: tuple[AudioWarning, ...] = ()


class SpeakerService:
    """The speakers of one server; safe beside other servers on the same storage."""

    def __init__(
        self,
        *,
        storage: Storage,
        ensurer: Ensurer,
        workers: Workers,
        encodings: EncodingSource,
        prompts: PromptMemory[Any],
        family: Callable[[], Family | None],
    ):
        self.storage = storage
        self.ensurer = ensurer
        self.running = RunningRequests()
        self._workers = workers
        self.encodings = encodings
        self.prompts = prompts
        self._looks = QuickLooks()
        self._family = family
        self._background: set[asyncio.Task[None]] = set()

    async def register_audio(
        self, upload: Upload, data: bytes, *, precompute: bool
    ) -> Registration:
        """Register a speaker by a reference clip.

        Nothing that exists is touched before the clip is decoded, checked and safe.

        Raises: SpeakerRequestError, StorageError.
        """
        decoded = await asyncio.to_thread(decode, data)
        new = _new_speaker(upload, decoded.audio, len(data))
        record = await self._register(new, decoded.audio)
        if precompute:
            self._precompute_in_background(record)
        return Registration(record=record, warnings=decoded.warnings)

    async def register_embedding(
        self, upload: Upload, embedding: tuple[float, ...]
    ) -> Registration:
        """Register a speaker by a raw speaker embedding: ready at once."""
        new = NewSpeaker(
            name=upload.name,
            consent=upload.consent,
            ref_text=upload.ref_text,
            description=upload.description,
            mime_type="application/x-safetensors",
            original_filename=upload.original_filename,
            file_size=4 * len(embedding),
            embedding=embedding,
        )
        return Registration(record=await self._register(new, None))

    async def get(self, name: str) -> SpeakerRecord:
        """Return the speaker of this name.

        Raises: SpeakerNotFoundError.
        """
        if (record := await self.find(name)) is None:
            raise SpeakerNotFoundError(name)
        return record

    async def find(self, name: str) -> SpeakerRecord | None:
        """Return the speaker of this name, or None; one indexed read.

        Raises: StorageError.
        """
        registry = self.storage.registry
        try:
            return await self._looks.run(lambda: registry.get_at_once(name))
        except StorageError:  # a lock that a thread can wait for, or it says what else
            return await asyncio.to_thread(registry.get, name)

    async def list(
        self, *, limit: int, after: str | None, search: str | None
    ) -> list[SpeakerRecord]:
        """Return a page of speakers, ordered by name."""
        return await asyncio.to_thread(
            self.storage.registry.list,
            limit=limit,
            after=after or "",
            search=search or "",
        )

    async def delete(self, name: str) -> SpeakerRecord:
        """Remove the speaker; returns when no worker has anything left of it.

        Raises: SpeakerNotFoundError; StorageError or WorkerRPCError if something of
            it may be left, in which case the name is gone all the same.
        """
        record = await asyncio.to_thread(self.storage.registry.delete, name)
        if record is None:
            raise SpeakerNotFoundError(name)
        await self._release(record)
        return record

    async def precompute(self, record: SpeakerRecord, *, force: bool) -> bool:
        """Make the speaker's encodings exist; True if they already did.

        Raises: EncodeError, EncodeTimeoutError, WorkerRPCError.
        """
        if (need := self.need_of(record)) is None:
            return True
        if force and record.audio_sha256 is not None:
            await self._workers.call("tts_cache_forget", [record.audio_sha256])
        return await self.ensurer.ensure(need)

    async def status(self, record: SpeakerRecord) -> tuple[CacheStatus, str | None]:
        """Derive the speaker's status and, of ``failed``, the reason."""
        if (need := self.need_of(record)) is None:
            return "ready", None
        return await self.ensurer.status(need)

    def need_of(self, record: SpeakerRecord) -> EncodingNeed | None:
        """What the speaker needs in its own mode; None for an embedding."""
        if record.audio_sha256 is None:
            return None
        family, names = self._family(), tuple[str, ...]()
        if family is not None:  # else the workers say what they cannot do
            names = family.precomputed(has_transcript=bool(record.ref_text))
        return need_of(record.audio_sha256, Segment.REGISTERED, names)

    async def stats(self) -> dict[str, object]:
        """Registry count and each worker's counters."""
        count = await asyncio.to_thread(self.storage.registry.count)
        return {
            "registry": {"speakers": count},
            "flights": self.ensurer.num_flights,
            "workers": await self._workers.call("tts_cache_stats"),
        }

    async def _register(
        self, new: NewSpeaker, audio: ReferenceAudio | None
    ) -> SpeakerRecord:
        registered = await asyncio.to_thread(self.storage.register, new, audio)
        if registered.replaced is not None:
            self._in_background(self._release(registered.replaced))
        return registered.record

    async def _release(self, record: SpeakerRecord) -> None:
        """Drop what only this record referred to, from every tier."""
        if (sha := record.audio_sha256) is None:
            return
        await self.running.drained(sha)
        if await asyncio.to_thread(self.storage.release, sha):
            self.prompts.forget(sha)
            try:
                await self._workers.call("tts_cache_forget", [sha])
            except UnsupportedModelError:
                logger.debug("No worker keeps encodings of this model.")

    def _precompute_in_background(self, record: SpeakerRecord) -> None:
        if (need := self.need_of(record)) is not None:
            self._in_background(self.ensurer.ensure(need))

    def _in_background(self, work: Awaitable[object]) -> None:
        async def run() -> None:
            try:
                await work
            except TTSCacheError as exc:  # the next request that needs it says it
                logger.warning("In the background: %s", exc)

        task = asyncio.create_task(run())
        self._background.add(task)  # the loop itself keeps only a weak reference
        task.add_done_callback(self._background.discard)


def _new_speaker(upload: Upload, audio: ReferenceAudio, file_size: int) -> NewSpeaker:
    return NewSpeaker(
        name=upload.name,
        consent=upload.consent,
        ref_text=upload.ref_text,
        description=upload.description,
        mime_type=upload.mime_type,
        original_filename=upload.original_filename,
        file_size=file_size,
        audio_sha256=audio.audio_sha256,
        num_samples=audio.num_samples,
        sample_rate_hz=audio.sample_rate_hz,
    )
