"""Drives a coroutine by its suspensions, so that each of them can be the last."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from typing import Any, Literal

Coro = Coroutine[Any, Any, Any]
Moment = Literal["waiting", "come"]
MOMENTS: tuple[Moment, ...] = ("waiting", "come")


class Steps:
    """Awaits a coroutine, and calls ``act`` at its suspension of that number, from 1.

    At the moment ``waiting``: as the coroutine begins to wait. ``come``: once what it
    waits for is there, but before it could go on with it.
    """

    def __init__(
        self, coroutine: Coro, number: int, act: Callable[[], object], moment: Moment
    ):
        self._steps = coroutine.__await__()
        self._number = number
        self._act = act
        self._moment = moment
        self.num_suspensions = 0

    @property
    def has_acted(self) -> bool:
        """Whether the coroutine came that far."""
        return self.num_suspensions >= self._number

    def __await__(self) -> Generator[Any, Any, Any]:
        step = lambda: self._steps.send(None)  # noqa: E731
        while True:
            try:
                awaited = step()
            except StopIteration as stop:
                return stop.value
            self.num_suspensions += 1
            if self.num_suspensions == self._number:
                self._arm(awaited)
            try:
                yield awaited
            except BaseException as exc:  # noqa: BLE001  it is the coroutine's
                step = lambda exc=exc: self._steps.throw(exc)  # noqa: E731
            else:
                step = lambda: self._steps.send(None)  # noqa: E731

    def _arm(self, awaited: Any) -> None:
        if self._moment == "waiting" or awaited is None:
            self._act()
        else:
            # Before the task itself is told, which is added when this was yielded.
            awaited.add_done_callback(lambda _: self._act())


async def at_each_suspension(
    make: Callable[[], Coro], moment: Moment, *, at_least: int
) -> AsyncIterator[None]:
    """Cancel ``make()`` at its first suspension, a new one at its second, and so on.

    Yields after each; ends when one finishes before it is cancelled, which must have
    suspended so many times at least, or the test tests less than it says.
    """
    number = 1
    while await cancelled_at(make(), number, moment):
        yield
        number += 1
    yield
    assert number > at_least, number


async def cancelled_at(coroutine: Coro, number: int, moment: Moment) -> bool:
    """Cancel a coroutine at one suspension; False if it has not as many."""

    async def drive() -> None:
        task = asyncio.current_task()
        assert task is not None
        steps.append(Steps(coroutine, number, task.cancel, moment))
        await steps[0]

    steps: list[Steps] = []
    task = asyncio.create_task(drive())
    await asyncio.wait([task])
    if not steps[0].has_acted:
        task.result()  # unhindered it must not fail
    return steps[0].has_acted


async def awaiting(awaitable: Awaitable[Any]) -> Any:
    """Make a coroutine of it, as a task wants one."""
    return await awaitable
