"""Threads for one kind of work, with a bound on what waits for them."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import ParamSpec, TypeVar

from vllm_tts_cache.errors import ServerBusyError
from vllm_tts_cache.tenants import Tenant

P = ParamSpec("P")
T = TypeVar("T")


class BoundedExecutor:
    """Runs functions in threads of its own; refuses a call if too many wait.

    Each kind of work has its own: asyncio's default pool has few threads, and one
    kind that waits for a lock or a disk would stop all the others.

    Args:
        what: The reason that a refusal's message gives; the threads are named so, too.
        num_threads: Functions that run at once.
        max_waiting: Functions that may wait for a thread.
        nice: CPU priority of its threads, where the process has a higher one.
    """

    def __init__(self, what: str, *, num_threads: int, max_waiting: int, nice: int = 0):
        self._what = what
        self._max_pending = num_threads + max_waiting
        self._num_pending = 0
        self._is_shut_down = False
        lower = partial(_lower_priority, nice) if nice else None
        self._pool = ThreadPoolExecutor(num_threads, f"tts-cache: {what}", lower)

    async def run(
        self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return what the function returns.

        If a caller is cancelled, a running function goes on; a waiting one never runs.

        Raises: ServerBusyError, and whatever the function raises.
        """
        if self._is_shut_down:
            raise ServerBusyError("it is shutting down")
        if self._num_pending >= self._max_pending:
            raise ServerBusyError(self._what)
        loop = asyncio.get_running_loop()
        future = self._pool.submit(function, *args, **kwargs)
        self._num_pending += 1

        def leave(_: object) -> None:
            # At exit the loop may be closed before the last thread is done.
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._leave)

        # A call counts until its thread is done, also if its caller has left.
        future.add_done_callback(leave)
        return await asyncio.wrap_future(future)

    def shutdown(self) -> None:
        """Cancel waiting calls, and refuse new ones; running ones end by themselves."""
        self._is_shut_down = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _leave(self) -> None:
        self._num_pending -= 1


def _lower_priority(nice: int) -> None:
    # Commands check uploads with these modules, and need no torch for it.
    from vllm_tts_cache.speaker.precision import lower_priority

    lower_priority(nice)


class Slots:
    """Bounds how many callers hold a slot at once; for the event loop only.

    Args:
        what: The reason that a refusal's message gives.
        num_slots: How many may be held at once.
    """

    def __init__(self, what: str, num_slots: int):
        self._what = what
        self._num_free = num_slots

    def enter(self) -> Callable[[], None]:
        """Take a slot; returns a function that gives it back, once if repeated.

        Raises: ServerBusyError.
        """
        if not self._num_free:
            raise ServerBusyError(self._what)
        self._num_free -= 1
        held = [True]

        def leave() -> None:
            if held:
                held.pop()
                self._num_free += 1

        return leave


class TenantSlots:
    """Bounds each tenant's inline references under way; for the event loop only."""

    def __init__(self) -> None:
        self._num_taken: defaultdict[str, int] = defaultdict(int)

    @contextmanager
    def inline(self, tenant: Tenant) -> Iterator[None]:
        """Hold a slot while an inline reference is fetched and encoded.

        Raises: ServerBusyError.
        """
        name, limit = tenant.name, tenant.limits.max_inline
        if limit is not None and self._num_taken[name] >= limit:
            what = f"{limit} inline references of this tenant are under way"
            raise ServerBusyError(what)
        self._num_taken[name] += 1
        try:
            yield
        finally:
            self._num_taken[name] -= 1
            if not self._num_taken[name]:
                del self._num_taken[name]
