"""Inline reference audio, which a request brings as a URL."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Generic, TypeVar

from cachetools import LRUCache

from vllm_tts_cache.audio.decode import (
    DecodedAudio,
    decode,
    decode_data_url,
    is_data_url,
)
from vllm_tts_cache.audio.reference import Segment
from vllm_tts_cache.entrypoints.metrics import process_metrics
from vllm_tts_cache.entrypoints.speakers.executors import BoundedExecutor
from vllm_tts_cache.entrypoints.speakers.lookups import ReadExecutor
from vllm_tts_cache.entrypoints.speakers.pending import too_many_inline
from vllm_tts_cache.errors import InvalidAudioError, ServerBusyError
from vllm_tts_cache.speaker.reference import SpeakerRef
from vllm_tts_cache.store.speaker_store import SpeakerStore

MAX_REMEMBERED_CLIPS = 1024
NUM_DECODE_THREADS = 2
MAX_WAITING_DECODES = 64
NUM_DIGEST_THREADS = 2
MAX_WAITING_DIGESTS = 1024

T = TypeVar("T")
Fetch = Callable[[str], Awaitable[bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """Reference audio by address, with what the prompt's length depends on.

    Attributes:
        num_samples: At the clip's own rate.
        num_clips: How many it is made of.
    """

    ref: SpeakerRef
    num_samples: int
    sample_rate_hz: int
    num_clips: int = 1


class InlineClips:
    """Decodes, checks and stores inline reference audio; for the event loop only.

    A client that repeats its data URL pays one hash of it, not one decoding. What
    another URL serves may change, so it is fetched again; requests at the same time
    share one fetch.

    Args:
        max_fetches: URLs that are fetched at once.
        refuses: Whether a clip, by its address, is one too many of those that wait.
    """

    def __init__(
        self,
        store: SpeakerStore,
        lookups: ReadExecutor,
        *,
        max_fetches: int,
        refuses: Callable[[str], bool],
    ):
        self._store = store
        self._lookups = lookups
        self._max_fetches = max_fetches
        self._refuses = refuses
        self._known = LRUCache[bytes, Clip](MAX_REMEMBERED_CLIPS)
        self._num_deletes = 0
        self._num_fetches = process_metrics().fetches
        self._fetches = SharedTasks[Clip]()
        self._decodes = SharedTasks[Clip]()
        self._executor = BoundedExecutor(
            "too many clips wait to be decoded",
            num_threads=NUM_DECODE_THREADS,
            max_waiting=MAX_WAITING_DECODES,
        )
        # A pool of its own, so that a known clip does not wait for decodes of new ones.
        self._digests = BoundedExecutor(
            "too many data URLs wait",
            num_threads=NUM_DIGEST_THREADS,
            max_waiting=MAX_WAITING_DIGESTS,
        )

    async def resolve(self, url: str, fetch: Fetch) -> Clip:
        """Return the clip of a URL, which ``fetch`` fetches, and store its audio.

        Raises: InvalidAudioError, ServerBusyError, StorageError.
        """
        if is_data_url(url):
            return await self._of_data_url(url)
        if url not in self._fetches and len(self._fetches) >= self._max_fetches:
            self._num_fetches.labels("refused").inc()
            what = f"{self._max_fetches} references are being fetched"
            raise ServerBusyError(what)
        return await self._fetches.run(url, lambda: self._fetch(url, fetch))

    def delete(self, audio_sha256: str) -> None:
        """Delete the remembered clips of this audio; a running decode adds none."""
        self._num_deletes += 1
        for digest, clip in list(self._known.items()):
            if clip.ref.audio_sha256 == audio_sha256:
                del self._known[digest]

    def delete_all(self) -> None:
        """Delete all remembered clips; a running decode adds none."""
        self._num_deletes += 1
        self._known.clear()

    def shutdown(self) -> None:
        """Stop the threads."""
        self._executor.shutdown()
        self._digests.shutdown()

    async def _of_data_url(self, url: str) -> Clip:
        # A data URL has up to 14 MB: hashing it takes too long for the event loop.
        digest = await self._digests.run(lambda: sha256(url.encode()).digest())
        clip = self._known.get(digest)
        # It may have been evicted, or deleted together with a voice of the same clip.
        if clip is not None and await self._lookups.run(
            self._store.has_audio, clip.ref.audio_sha256
        ):
            return clip
        return await self._decodes.run(digest.hex(), lambda: self._decode(url, digest))

    async def _decode(self, url: str, digest: bytes) -> Clip:
        num_deletes = self._num_deletes
        clip = await self._executor.run(lambda: self._keep(decode_data_url(url)))
        if num_deletes != self._num_deletes:
            return clip  # it may be what was just deleted
        self._known[digest] = clip
        return clip

    async def _fetch(self, url: str, fetch: Fetch) -> Clip:
        try:
            data = await fetch(url)
        except InvalidAudioError:
            self._num_fetches.labels("failed").inc()
            raise
        self._num_fetches.labels("fetched").inc()
        return await self._executor.run(lambda: self._keep(decode(data)))

    def _keep(self, decoded: DecodedAudio) -> Clip:
        audio = decoded.audio
        sha = audio.audio_sha256
        if self._refuses(sha) and not self._store.stored_artifacts([sha])[sha]:
            # Stored and then refused, it would evict the audio of requests that wait.
            raise too_many_inline()
        self._store.store_inline(decoded)
        return Clip(
            ref=SpeakerRef(audio_sha256=sha, segment=Segment.INLINE),
            num_samples=audio.num_samples,
            sample_rate_hz=audio.sample_rate_hz,
        )


class SharedTasks(Generic[T]):
    """One task per key, shared by its callers, and cancelled when the last leaves."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[T]] = {}
        self._num_waiting: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, key: str) -> bool:
        return key in self._tasks

    async def run(self, key: str, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what the key's task returns, starting it if there is none.

        Raises: Whatever the task raises.
        """
        if (task := self._tasks.get(key)) is None:
            task = asyncio.create_task(start())
            self._tasks[key] = task
            self._num_waiting[key] = 0
            task.add_done_callback(lambda done: self._end(key, done))
        self._num_waiting[key] += 1
        try:
            return await asyncio.shield(task)
        finally:
            if self._tasks.get(key) is task:  # else it is over
                self._num_waiting[key] -= 1
                if self._num_waiting[key] == 0 and not task.done():
                    # Deleted at once: no caller may join what is being cancelled.
                    del self._tasks[key], self._num_waiting[key]
                    task.cancel()

    def _end(self, key: str, task: "asyncio.Task[T]") -> None:
        if not task.cancelled():
            task.exception()  # else asyncio logs a failure without a caller
        if self._tasks.get(key) is task:
            del self._tasks[key], self._num_waiting[key]
