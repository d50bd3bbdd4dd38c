"""Waiting for what comes soon, and not for ever; and a clock that a test sets."""

import asyncio
import time

SOON_SECONDS = 60.0


class Clock:
    """Stands still until ``now`` is set."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


async def soon(condition, seconds=SOON_SECONDS):
    """Until the condition holds; fail if it does not within so many seconds."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        await asyncio.sleep(0.01)


def wait_until(condition):
    """As `soon`, without an event loop."""
    until = time.monotonic() + SOON_SECONDS
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


async def settled(encodings):
    """Until precomputing has nothing left, and no background task runs."""
    if encodings._precomputing is not None:
        for _ in range(2):  # the pass that is under way, and a whole one
            encodings._has_registered.set()
            await soon(lambda: not encodings._has_registered.is_set())
    while encodings._background:
        await asyncio.wait(set(encodings._background))
