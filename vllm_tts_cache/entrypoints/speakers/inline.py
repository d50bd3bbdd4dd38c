"""Inline reference audio: what a request brings as a URL, and how it is fetched."""

import asyncio
import hashlib
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from cachetools import LRUCache
from vllm import envs
from vllm.connections import HTTPConnection
from vllm.exceptions import VLLMError
from vllm.multimodal.media import MediaConnector
from vllm.multimodal.media.base import MediaIO

from vllm_tts_cache.audio.decode import (
    DecodedAudio,
    decode,
    decode_data_url,
    is_data_url,
)
from vllm_tts_cache.audio.limits import DEFAULT_LIMITS
from vllm_tts_cache.catalogue.records import Segment
from vllm_tts_cache.entrypoints.metrics.series import process_metrics
from vllm_tts_cache.entrypoints.speakers.executors import (
    RETRY_AFTER_SECONDS,
    BoundedExecutor,
)
from vllm_tts_cache.entrypoints.speakers.lookups import ReadExecutor
from vllm_tts_cache.entrypoints.speakers.wants import too_many_inline
from vllm_tts_cache.errors import InvalidAudioError, ServerBusyError, TTSCacheError
from vllm_tts_cache.speaker.reference import SpeakerRef
from vllm_tts_cache.store.speaker_store import SpeakerStore

NUM_NAME_THREADS = 16
_MAX_REASON_CHARS = 500  # of the host, which quotes what it was given
_NUMERIC = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV

MAX_REMEMBERED_CLIPS = 1024
NUM_DECODE_THREADS = 2
MAX_WAITING_DECODES = 64
NUM_DIGEST_THREADS = 2
MAX_WAITING_DIGESTS = 1024

T = TypeVar("T")


class FetchConnection(HTTPConnection):
    """The host's, which looks up names in threads of its own, with a bound on them.

    Where no name server answers, a look-up goes on for seconds after its client has
    left. The host's loop would look up two names at a time, and all others that ever
    were asked for after them; asyncio's own in the default pool, where the host waits
    for its workers.

    Args:
        max_waiting: Names that may wait for a thread.
    """

    def __init__(self, *, max_waiting: int):
        super().__init__()
        self._names = BoundedExecutor(
            "too many host names are looked up",
            num_threads=NUM_NAME_THREADS,
            max_waiting=max_waiting,
        )

    async def get_async_client(self) -> aiohttp.ClientSession:
        """As the host's, but for the resolver."""
        if self._async_client is None:
            connector = aiohttp.TCPConnector(resolver=_Resolver(self._names))
            self._async_client = aiohttp.ClientSession(
                trust_env=True, connector=connector
            )
        return self._async_client

    def shutdown(self) -> None:
        """Stop the threads; the session stays open as long as the host's own."""
        self._names.shutdown()


def reason_of(error: Exception) -> str:
    """Say why a reference was not fetched.

    The host calls a certificate that is not trusted an invalid URL, and names the field
    of another API (``image_url``) in what it knows of it.
    """
    for each in _causes(error):
        if isinstance(each, ssl.SSLCertVerificationError):
            return (
                "the certificate of its server is not trusted "
                f"({each.verify_message.rstrip('.')}). Send the clip as a data URL, or "
                "register it; who runs this server can trust the certificate "
                "(SSL_CERT_FILE)"
            )
        if isinstance(each, ssl.SSLError):
            if each.reason == "WRONG_VERSION_NUMBER":
                return "its server speaks no TLS at that port. Try http:// instead"
            return f"its server and this one agree on no TLS ({each.reason})"
    told = error.args[0] if isinstance(error, VLLMError) else error
    return str(told)[:_MAX_REASON_CHARS]


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        if not isinstance(error, aiohttp.ClientError):  # whose are Python's by class
            yield error
        error = error.__cause__ or error.__context__


class _Resolver(AbstractResolver):
    def __init__(self, names: BoundedExecutor):
        self._names = names

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses of a host.

        Raises: ServerBusyError, OSError.
        """
        return await self._names.run(_addresses, host, port, family)

    async def close(self) -> None:
        """The threads are closed by whoever has made them."""


def _addresses(
    host: str, port: int, family: socket.AddressFamily
) -> list[ResolveResult]:
    # As aiohttp asks: none of a family that this machine has no address of.
    kind, flags = socket.SOCK_STREAM, socket.AI_ADDRCONFIG
    found = socket.getaddrinfo(host, port, family=family, type=kind, flags=flags)
    return [
        ResolveResult(
            hostname=host,
            # Not the address itself: of a link-local one the interface belongs to it.
            host=socket.getnameinfo(address, _NUMERIC)[0],
            port=port,
            family=each_family,
            proto=proto,
            flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
        )
        for each_family, _, proto, _, address in found
    ]


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
    """Inline reference audio: decoded, checked and stored once, then known by its text.

    A client that repeats its data URL pays one hash of it, not one decoding. What lies
    behind another URL may change, so it is fetched again, but once at a time. For the
    event loop only.

    Args:
        max_fetches: URLs that are fetched at once.
        is_full: Whether an encode would be refused because too many inline clips wait.
    """

    def __init__(
        self,
        store: SpeakerStore,
        lookups: ReadExecutor,
        *,
        max_fetches: int,
        is_full: Callable[[], bool],
    ):
        self._store = store
        self._lookups = lookups
        self._max_fetches = max_fetches
        self._is_full = is_full
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
        # Of its own: a known clip does not wait until new ones are decoded.
        self._digests = BoundedExecutor(
            "too many data URLs wait",
            num_threads=NUM_DIGEST_THREADS,
            max_waiting=MAX_WAITING_DIGESTS,
        )

    async def resolve(self, url: str, connector: MediaConnector) -> Clip:
        """Return the clip behind a data, http(s) or file URL; its audio is stored.

        What a server may fetch is the host's decision: its allowed media domains
        and its allowed local media path hold here as well.

        Raises: InvalidAudioError, ServerBusyError, StorageError.
        """
        if is_data_url(url):
            return await self._of_data_url(url)
        if url not in self._fetches and len(self._fetches) >= self._max_fetches:
            self._count("refused")
            what = f"{self._max_fetches} references are being fetched"
            raise ServerBusyError(what, RETRY_AFTER_SECONDS)
        return await self._fetches.run(url, lambda: self._fetch(url, connector))

    def delete(self, audio_sha256: str) -> None:
        """Delete what data URLs hold of this audio; what is decoded now is not kept."""
        self._num_deletes += 1
        for digest, clip in list(self._known.items()):
            if clip.ref.audio_sha256 == audio_sha256:
                del self._known[digest]

    def delete_all(self) -> None:
        """Delete what all data URLs hold; what is decoded now is not kept."""
        self._num_deletes += 1
        self._known.clear()

    def shutdown(self) -> None:
        """Stop the threads."""
        self._executor.shutdown()
        self._digests.shutdown()

    async def _of_data_url(self, url: str) -> Clip:
        digest = await self._digests.run(_digest, url)
        clip = self._known.get(digest)
        # It may be evicted since, or deleted together with a voice of the same clip.
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

    async def _fetch(self, url: str, connector: MediaConnector) -> Clip:
        try:
            data = await _fetched(url, connector)
        except InvalidAudioError:
            self._count("failed")
            raise
        self._count("fetched")
        return await self._executor.run(lambda: self._keep(decode(data)))

    def _count(self, outcome: str) -> None:
        self._num_fetches.labels(outcome).inc()

    def _keep(self, decoded: DecodedAudio) -> Clip:
        audio = decoded.audio
        if self._is_full() and not self._is_known(audio.audio_sha256):
            # Stored and then refused, it would push out the audio of those that wait.
            raise too_many_inline()
        self._store.keep_inline(decoded)
        ref = SpeakerRef(audio_sha256=audio.audio_sha256, segment=Segment.INLINE)
        return Clip(
            ref=ref,
            num_samples=audio.num_samples,
            sample_rate_hz=audio.sample_rate_hz,
        )

    def _is_known(self, audio_sha256: str) -> bool:
        return bool(self._store.stored_kinds([audio_sha256])[audio_sha256])


class SharedTasks(Generic[T]):
    """One task per key for all who wait for it; it ends with the last of them."""

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
            self._leave(key, task)

    def _leave(self, key: str, task: "asyncio.Task[T]") -> None:
        if self._tasks.get(key) is not task:
            return  # it is over
        self._num_waiting[key] -= 1
        if self._num_waiting[key] == 0 and not task.done():
            # Deleted at once: who comes now must not join what is being cancelled.
            del self._tasks[key], self._num_waiting[key]
            task.cancel()

    def _end(self, key: str, task: "asyncio.Task[T]") -> None:
        if not task.cancelled():
            task.exception()  # else a failure that nobody waited for would be logged
        if self._tasks.get(key) is task:
            del self._tasks[key], self._num_waiting[key]


async def _fetched(url: str, connector: MediaConnector) -> bytes:
    """Fetch a file, within the host's limit of time and ours of bytes.

    Raises: InvalidAudioError.
    """
    seconds = envs.VLLM_AUDIO_FETCH_TIMEOUT
    # The host's limit is for one attempt, and for one read of a server that drips.
    fetch = connector.load_from_url_async(url, _FileIO(), fetch_timeout=seconds)
    try:
        return await asyncio.wait_for(fetch, seconds)
    except TTSCacheError:
        raise
    except asyncio.TimeoutError as exc:
        raise InvalidAudioError(
            f"its URL cannot be fetched: it took longer than {seconds:g} s "
            "(VLLM_AUDIO_FETCH_TIMEOUT)"
        ) from exc
    except Exception as exc:
        # A URL that is not allowed, not there or too slow is the caller's to mend,
        # and the host's reasons come in many classes.
        reason = f"its URL cannot be fetched: {reason_of(exc)}"
        raise InvalidAudioError(reason) from exc


class _FileIO(MediaIO[bytes]):
    """The host fetches; we decode, at the source's precision and in our threads."""

    def get_max_bytes(self) -> int:
        return DEFAULT_LIMITS.max_bytes

    def load_bytes(self, data: bytes) -> bytes:
        return data

    def load_base64(self, media_type: str, data: str) -> bytes:
        del data
        raise InvalidAudioError(f"a data URL ({media_type}) is not fetched")

    def load_file(self, filepath: Path) -> bytes:
        with filepath.open("rb") as file:
            # One byte more, so that a file that is too large shows.
            return file.read(DEFAULT_LIMITS.max_bytes + 1)


def _digest(url: str) -> bytes:
    # Up to 14 MB: too long for the event loop.
    return hashlib.sha256(url.encode()).digest()
