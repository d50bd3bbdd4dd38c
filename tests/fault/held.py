"""What a process holds on to, before and after."""

import asyncio
import gc
import threading
import time
from pathlib import Path

from tests.fault.hostile_input import VOICES, clip

ON_DEMAND = 8  # threads in which the host loads media, each begun when it is needed
PATIENCE_SECONDS = 10.0
ALL_THREADS = 16  # more at once than any executor has threads


def tasks_of(loop):
    """What runs in the background, without what it waits for.

    Before Python 3.12 `asyncio.wait_for` makes a task of that, while it waits.
    """
    running = asyncio.all_tasks(loop)
    return [task for task in running if "Event.wait" not in repr(task.get_coro())]


class Held:
    """What this process holds on to."""

    def __init__(self, loop):
        gc.collect()
        self.threads = threading.active_count()
        self.descriptors = sum(1 for _ in Path("/proc/self/fd").iterdir())
        running = tasks_of(loop)
        self.tasks = len(running)
        self.names = sorted(str(task.get_coro()) for task in running)

    def assert_no_more_than(self, before):
        assert self.threads <= before.threads + ON_DEMAND, (before, self)
        assert self.descriptors <= before.descriptors + ON_DEMAND, (before, self)

    def __repr__(self):
        return (
            f"{self.threads} threads, {self.descriptors} fds, {self.tasks} tasks: "
            f"{self.names}"
        )


def held_at_rest(loop, before):
    """What is held once there are no more tasks than before, or after ten seconds."""
    until = time.monotonic() + PATIENCE_SECONDS
    while len(tasks_of(loop)) > before.tasks and time.monotonic() < until:
        loop.run_until_complete(asyncio.sleep(0.01))
    return Held(loop)


async def with_all_threads(server):
    """Every thread has begun that ever will, and has its connection."""
    assert (await server.register("Ann", clip("wav"), ref_text="words")).is_success
    assert (await server.speak(voice="Ann")).is_success
    assert (await server.client.delete(f"{VOICES}/Ann")).is_success
    refused = await server.speak(ref_audio="file:///etc/passwd", ref_text="a")
    assert refused.status_code == 400
    service, fetching = server.service, server.handler.fetch_connection
    pools = service.uploads._threads, service.uploads.changes
    pools += service.lookups.reads, service.inline._executor
    pools += service.deletions._clients, service.deletions._own
    pools += (service.deletions._removals,)
    pools += service.inline._digests, service.texts, fetching._names
    await asyncio.gather(
        *(asyncio.to_thread(look, server) for _ in range(ALL_THREADS)),
        *(pool.run(look, server) for pool in pools for _ in range(ALL_THREADS)),
    )


def look(server):
    time.sleep(0.05)
    server.service.store.num_speakers()
