"""asyncio's default pool, in which the host waits for its workers, without a thread."""

import asyncio
import threading
from contextlib import asynccontextmanager

MORE_THAN_THREADS = 64  # it has 32 at most


@asynccontextmanager
async def filled_default_pool():
    """No thread of it is free."""
    loop, gate = asyncio.get_running_loop(), threading.Event()
    held = [loop.run_in_executor(None, gate.wait) for _ in range(MORE_THAN_THREADS)]
    try:
        yield
    finally:
        gate.set()
        await asyncio.gather(*held)
