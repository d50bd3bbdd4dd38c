"""Threads for one kind of work, with a bound on what waits for them."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from vllm_tts_cache.errors import ServerBusyError
from vllm_tts_cache.speaker.precision import lower_priority
from vllm_tts_cache.tenants import Tenant

RETRY_AFTER_SECONDS = 2

P = ParamSpec("P")
T = TypeVar("T")


class BoundedExecutor:
    """Runs functions in threads of its own; refuses what would wait too long.

    Each kind of work has its own: asyncio's default pool has few threads, and one
    kind that waits for a lock or a disk would stop all the others.

    Args:
        what: What is too much of it, for the message of a refusal; its threads are
            called that, too.
        num_threads: Functions that run at once.
        max_waiting: Functions that may wait for a thread.
        gives_way: Whether those that speak go first, see `lower_priority`.
    """

    def __init__(
        self, what: str, *, num_threads: int, max_waiting: int, gives_way: bool = False
    ):
        self._what = what
        self._max_pending = num_threads + max_waiting
        self._num_pending = 0
        self._is_shut_down = False
        self._pool = ThreadPoolExecutor(
            num_threads,
            thread_name_prefix=f"tts-cache: {what}",
            initializer=lower_priority if gives_way else None,
        )

    async def run(
        self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return what the function returns.

        A caller that leaves does not stop what runs; what still waits is not begun.

        Raises: ServerBusyError, and whatever the function raises.
        """
        if self._is_shut_down:
            raise ServerBusyError("it stops", RETRY_AFTER_SECONDS)
        if self._num_pending >= self._max_pending:
            raise ServerBusyError(self._what, RETRY_AFTER_SECONDS)
        loop = asyncio.get_running_loop()
        future = self._pool.submit(function, *args, **kwargs)
        self._num_pending += 1
        # Counted until the thread is done with it, not until the caller has left.
        future.add_done_callback(lambda _: _call_in(loop, self._leave))
        return await asyncio.wrap_future(future)

    def shutdown(self) -> None:
        """Cancel what waits, and refuse what comes; what runs ends by itself."""
        self._is_shut_down = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _leave(self) -> None:
        self._num_pending -= 1


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    # At exit the loop may be closed before the last thread is done.
    if not loop.is_closed():
        loop.call_soon_threadsafe(function)


class Slots:
    """So many at once, and one more is refused; for the event loop only.

    Args:
        what: What is too much of it, for the message of a refusal.
        num_places: How many.
    """

    def __init__(self, what: str, num_places: int):
        self._what = what
        self._num_free = num_places

    def enter(self) -> Callable[[], None]:
        """Take a place; returns what gives it back, once however often it is called.

        Raises: ServerBusyError.
        """
        if not self._num_free:
            raise ServerBusyError(self._what, RETRY_AFTER_SECONDS)
        self._num_free -= 1
        held = [True]

        def leave() -> None:
            if held:
                held.pop()
                self._num_free += 1

        return leave


class TenantPlaces:
    """Inline references that each tenant has worked on; for the event loop only."""

    def __init__(self) -> None:
        self._num_taken: defaultdict[str, int] = defaultdict(int)

    @contextmanager
    def inline(self, tenant: Tenant) -> Iterator[None]:
        """Hold a place while an inline reference is fetched and encoded.

        Raises: ServerBusyError.
        """
        name, limit = tenant.name, tenant.limits.max_inline
        if limit is not None and self._num_taken[name] >= limit:
            what = f"{limit} references of this key's tenant are worked on"
            raise ServerBusyError(what, RETRY_AFTER_SECONDS)
        self._num_taken[name] += 1
        try:
            yield
        finally:
            self._num_taken[name] -= 1
            if not self._num_taken[name]:
                del self._num_taken[name]
