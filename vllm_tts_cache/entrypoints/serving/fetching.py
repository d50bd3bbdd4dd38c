"""How the host fetches reference audio for us."""

import asyncio
import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from inspect import unwrap
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from pathlib import Path
from typing import Any, cast

import aiohttp
from vllm import envs
from vllm.connections import (
    HTTPConnection,
    HTTPResponseSizeExceededError,
    MediaDownloadSizeExceededError,
)
from vllm.exceptions import VLLMError, VLLMValidationError
from vllm.multimodal.media import MediaConnector
from vllm.multimodal.media.base import MediaIO

from vllm_tts_cache.audio.decode import CLIP_MAX_BYTES
from vllm_tts_cache.config import IPNetwork
from vllm_tts_cache.entrypoints.speakers.executors import BoundedExecutor
from vllm_tts_cache.errors import InvalidAudioError, TTSCacheError
from vllm_tts_cache.logs import ThrottledLog

throttled = ThrottledLog()

NUM_NAME_THREADS = 16
_RETRY_SECONDS = 1.0
_MAX_INTERIM = 16
_TOO_LARGE = (HTTPResponseSizeExceededError, MediaDownloadSizeExceededError)
_UNICAST, _NAT64 = IPv6Network("2000::/3"), IPv6Network("64:ff9b::/96")
# Python takes these for global; the metadata of two clouds are in the first two.
_INSIDE = [*map(IPv4Network, ("192.0.0.0/24", "168.63.129.16", "224.0.0.0/4"))]
# A proxy that the environment names is the operator's, wherever it is.
_is_to_proxy: ContextVar[bool] = ContextVar("_is_to_proxy", default=False)
_MAX_REASON_CHARS = 500  # of the host, which quotes what it was given


class NotPublicError(socket.gaierror):
    """No setting names this network inside, which is as if the name did not exist."""


class NotFetchedError(InvalidAudioError, VLLMValidationError, ValueError):
    """What is behind a URL cannot be had; the host answers with this text, as we do."""

    def __init__(self, reason: str):
        super().__init__(f"its URL cannot be fetched: {reason}")


class _Answer(aiohttp.ClientResponse):
    """An answer behind few interim ones, which a server may send without end."""

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        protocol, left = connection.protocol, iter(range(_MAX_INTERIM))
        read = protocol.read

        async def read_few() -> Any:
            if next(left, None) is None:
                raise aiohttp.ClientConnectionError("too many interim answers")
            return await read()

        protocol.read = read_few
        try:
            return await super().start(connection)
        finally:
            del protocol.read


class FetchConnection(HTTPConnection):
    """The host's connection, which strangers' URLs lead to the public internet only.

    Names are looked up in bounded threads of its own: where no name server answers, a
    look-up goes on after its client has left, and the host needs the default pool.

    Args:
        max_waiting: Names that may wait for a thread.
        networks: Networks inside whose addresses may be reached as well.
    """

    # The hosts that a URL and its redirects may name; empty for all.
    domains: Sequence[str] = ()

    def __init__(self, *, max_waiting: int, networks: Sequence[IPNetwork] = ()):
        super().__init__()
        self.networks = networks
        self._names = BoundedExecutor(
            "too many host names are looked up",
            num_threads=NUM_NAME_THREADS,
            max_waiting=max_waiting,
        )

    async def get_async_client(self) -> aiohttp.ClientSession:
        """Return the host's session, with our resolver, and each connection checked."""
        if self._async_client is None:
            resolver = aiohttp.ThreadedResolver(cast(Any, self))
            connector = aiohttp.TCPConnector(
                resolver=resolver, socket_factory=self._socket
            )
            self._async_client = aiohttp.ClientSession(
                trust_env=True,
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),  # a cookie is one tenant's
                middlewares=(self._check_hop,),
                response_class=_Answer,
            )
            # The environment names a proxy; the operator's .netrc is no tenant's.
            cast(Any, self._async_client)._get_netrc_auth = lambda _host: None
        return self._async_client

    def get_sync_client(self) -> Any:
        """Refuse what is fetched without the event loop, and would be unchecked."""
        raise NotImplementedError("references are fetched by async_get_bytes")

    async def async_get_bytes(self, url: str, **options: Any) -> bytes:
        """Fetch as the host does, whose log and errors would show URLs.

        Raises: NotFetchedError, ServerBusyError.
        """
        get = unwrap(HTTPConnection.async_get_bytes)
        num_left = envs.VLLM_MEDIA_FETCH_MAX_RETRIES
        while True:
            _is_to_proxy.set(False)
            try:
                return await get(self, url, **options)
            except TTSCacheError:
                raise
            except Exception as exc:
                num_left -= 1
                if num_left <= 0 or not self._may_pass(exc):
                    raise NotFetchedError(self._reason_of(exc)) from exc
                cause = type(exc).__name__
                throttled.warn_of(cause, "Fetching a reference again after %s", cause)
            await asyncio.sleep(_RETRY_SECONDS)

    def _may_pass(self, error: Exception) -> bool:
        """Tell whether another attempt may succeed, or time would tell a status."""
        for each in causes(error):
            if isinstance(each, socket.gaierror):
                return each.errno == socket.EAI_AGAIN
        if isinstance(error, _TOO_LARGE):
            return False  # that a server answers is told of a short file as well
        is_final = isinstance(error, ValueError) or getattr(error, "status", 500) < 500
        return bool(self.networks) or not is_final

    def _reason_of(self, error: Exception) -> str:
        """Say why a reference was not fetched, and nothing of the network inside."""
        found, is_by_proxy = [*causes(error)], _is_to_proxy.get()
        for each in found:
            if isinstance(each, NotPublicError if is_by_proxy else socket.gaierror):
                return (
                    "its host has no public address. Send the clip as a data URL, or "
                    "register it; who runs this server can name the host's network "
                    "(SPEAKER_CACHE_FETCH_NETWORKS)"
                )
        if is_by_proxy:
            return "the proxy of this server does not give it"
        if self.networks and not isinstance(error, _TOO_LARGE):
            # The server may be inside: which of its ports answer, and how, is not told.
            return "its server does not give it"
        return _public_reason(error, found)

    async def _check_hop(
        self, request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Send a request, or one that a redirect leads to, if it may go there."""
        host = request.url.raw_host or ""
        if self.domains and host not in self.domains:
            allowed = ", ".join(self.domains)
            raise NotFetchedError(
                f"it leads to none of the allowed domains ({allowed})"
            )
        _is_to_proxy.set(request.proxy is not None)
        if request.proxy is not None and not self._may_be_named(host):
            raise NotPublicError
        return await send(request)

    def _may_be_named(self, host: str) -> bool:
        with suppress(OSError):  # it is a name, or of IPv6
            host = socket.inet_ntoa(socket.inet_aton(host.rstrip(".")))
        with suppress(ValueError):
            return self._may_reach(host)
        return True  # the proxy looks the name up

    def _socket(self, found: Any) -> socket.socket:
        """Open a socket for an address. Raises: NotPublicError."""
        family, kind, protocol, _, address = found
        if not (_is_to_proxy.get() or self._may_reach(address[0])):
            raise NotPublicError
        return socket.socket(family, kind, protocol)

    def _may_reach(self, address: str) -> bool:
        """Whether an address is public or allowed. Raises: ValueError: It is a name."""
        ip = ip_address(address.partition("%")[0])
        if isinstance(ip, IPv6Address):
            ip = IPv4Address(ip.packed[-4:]) if ip in _NAT64 else ip.ipv4_mapped or ip
        return _is_public(ip) or any(ip in network for network in self.networks)

    async def getaddrinfo(self, host: str, port: int, **options: Any) -> Any:
        """Resolve in our threads. Raises: ServerBusyError, OSError."""
        return await self._names.run(socket.getaddrinfo, host, port, **options)

    async def getnameinfo(self, address: Any, flags: int) -> tuple[str, str]:
        """Resolve in our threads. Raises: ServerBusyError, OSError."""
        return await self._names.run(socket.getnameinfo, address, flags)

    def shutdown(self) -> None:
        """Stop the threads; the session stays open as long as the host's own."""
        self._names.shutdown()


def _is_public(ip: IPv4Address | IPv6Address) -> bool:
    if isinstance(ip, IPv4Address):
        return ip.is_global and not any(ip in network for network in _INSIDE)
    # Tunnels to addresses of IPv4 are not needed to reach anybody.
    is_tunnel = ip.sixtofour is not None or ip.teredo is not None
    return ip in _UNICAST and ip.is_global and not is_tunnel


def _public_reason(error: Exception, found: Sequence[BaseException]) -> str:
    for each in found:
        if isinstance(each, ssl.SSLCertVerificationError):
            return (
                "the certificate of its server is not trusted "
                f"({each.verify_message.rstrip('.')}). Send the clip as a data "
                "URL, or register it; who runs this server can trust the "
                "certificate (SSL_CERT_FILE)"
            )
        if isinstance(each, ssl.SSLError):
            if each.reason == "WRONG_VERSION_NUMBER":
                return "its server speaks no TLS at that port. Try http:// instead"
            return f"its server and this one agree on no TLS ({each.reason})"
    match error:  # texts of aiohttp name addresses, also those of redirects
        case aiohttp.ClientResponseError():
            return f"HTTP {error.status} error"
        case aiohttp.InvalidURL() | aiohttp.NonHttpUrlClientError():
            return "it leads to what is no HTTP address"
        case VLLMError() | MediaDownloadSizeExceededError():
            return str(error.args[0])
    return "its server cannot be reached, or breaks off"


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Return an error and what led to it, without what aiohttp made of that."""
    while error is not None:
        if not isinstance(error, aiohttp.ClientError):  # also Python's by class
            yield error
        error = error.__cause__ or error.__context__


async def fetch_audio(connector: MediaConnector, url: str) -> bytes:
    """Fetch a file that the connector allows, within the host's time and our bytes.

    Raises: InvalidAudioError.
    """
    seconds = envs.VLLM_AUDIO_FETCH_TIMEOUT
    # The host's limit is for one attempt, and for one read of a server that drips.
    fetch = connector.load_from_url_async(url, _FileIO(), fetch_timeout=seconds)
    try:
        return await asyncio.wait_for(fetch, seconds)
    except TTSCacheError:
        raise
    except TimeoutError as exc:
        reason = f"it took longer than {seconds:g} s (VLLM_AUDIO_FETCH_TIMEOUT)"
        raise NotFetchedError(reason) from exc
    except Exception as exc:
        # It is not allowed: the host's reasons come in many classes.
        raise NotFetchedError(str(exc)[:_MAX_REASON_CHARS]) from exc


class _FileIO(MediaIO[bytes]):
    """The host fetches; we decode, at the source's precision and in our threads."""

    def get_max_bytes(self) -> int:
        return CLIP_MAX_BYTES

    def load_bytes(self, data: bytes) -> bytes:
        return data

    def load_base64(self, media_type: str, data: str) -> bytes:
        del data
        raise InvalidAudioError(f"a data URL ({media_type}) is not fetched")

    def load_file(self, filepath: Path) -> bytes:
        with filepath.open("rb") as file:
            # One byte more, so that a file that is too large shows.
            return file.read(CLIP_MAX_BYTES + 1)
