"""How the host fetches reference audio for us."""

import asyncio
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import aiohttp
from vllm import envs
from vllm.connections import HTTPConnection
from vllm.exceptions import VLLMError
from vllm.multimodal.media import MediaConnector
from vllm.multimodal.media.base import MediaIO

from vllm_tts_cache.audio.limits import DEFAULT_LIMITS
from vllm_tts_cache.entrypoints.speakers.executors import BoundedExecutor
from vllm_tts_cache.errors import InvalidAudioError, TTSCacheError

NUM_NAME_THREADS = 16
_MAX_REASON_CHARS = 500  # of the host, which quotes what it was given


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
            resolver = aiohttp.ThreadedResolver(cast(Any, self))
            connector = aiohttp.TCPConnector(resolver=resolver)
            self._async_client = aiohttp.ClientSession(
                trust_env=True, connector=connector
            )
        return self._async_client

    async def getaddrinfo(self, host: str, port: int, **options: Any) -> Any:
        """As the event loop's, in our threads. Raises: ServerBusyError, OSError."""
        return await self._names.run(socket.getaddrinfo, host, port, **options)

    async def getnameinfo(self, address: Any, flags: int) -> tuple[str, str]:
        """As the event loop's, in our threads. Raises: ServerBusyError, OSError."""
        return await self._names.run(socket.getnameinfo, address, flags)

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
    reason = error.args[0] if isinstance(error, VLLMError) else error
    return str(reason)[:_MAX_REASON_CHARS]


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        if not isinstance(error, aiohttp.ClientError):  # whose are Python's by class
            yield error
        error = error.__cause__ or error.__context__


async def fetch_audio(connector: MediaConnector, url: str) -> bytes:
    """Fetch a file, within the host's limit of time and ours of bytes.

    The connector decides what may be fetched: the host's allowed media domains and its
    allowed local media path hold here as well.

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
