"""What a process holds on to, before and after."""

import asyncio
import gc
import threading
import time
from pathlib import Path

from tests.fault.hostile_input import VOICES, clip

ON_DEMAND = 8  # threads in which the host loads media, each begun when it is needed
ALL_THREADS = 16  # more at once than any executor has threads


class Held:
    """What this process holds on to."""

    def __init__(self, loop):
        gc.collect()
        self.threads = threading.active_count()
        self.descriptors = sum(1 for _ in Path("/proc/self/fd").iterdir())
        self.tasks = len(asyncio.all_tasks(loop))

    def __repr__(self):
        return f"{self.threads} threads, {self.descriptors} fds, {self.tasks} tasks"


async def with_all_threads(server):
    """Every thread has begun that ever will, and has its connection."""
    assert (await server.register("Ann", clip("wav"), ref_text="words")).is_success
    assert (await server.speak(voice="Ann")).is_success
    assert (await server.client.delete(f"{VOICES}/Ann")).is_success
    refused = await server.speak(ref_audio="file:///etc/passwd", ref_text="a")
    assert refused.status_code == 400
    service = server.service
    pools = service._uploads, service._reads, service.inline._executor
    pools += service.deletions._clients, service.deletions._own
    await asyncio.gather(
        *(asyncio.to_thread(look, server) for _ in range(ALL_THREADS)),
        *(pool.run(look, server) for pool in pools for _ in range(ALL_THREADS)),
    )


def look(server):
    time.sleep(0.05)
    server.service.store.catalogue.count()
