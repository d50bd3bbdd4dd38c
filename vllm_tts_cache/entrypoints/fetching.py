"""How the host's connection finds the address of a reference's host."""

import socket

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from vllm.connections import HTTPConnection

from vllm_tts_cache.entrypoints.executors import BoundedExecutor

NUM_NAME_THREADS = 16
_NUMERIC = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV


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
