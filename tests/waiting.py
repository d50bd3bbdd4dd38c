"""Waiting for what comes soon, and not for ever."""

import asyncio
import time

SOON_SECONDS = 20.0


async def soon(condition, seconds=SOON_SECONDS):
    """Until the condition holds; fail if it does not within so many seconds."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        await asyncio.sleep(0.01)
