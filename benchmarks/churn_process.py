"""The process of the scenario ``churn``: ``python -m benchmarks.churn_process``.

Speaks, registers and deletes on a storage directory and a worker's speaker side, in
the order in which the server does each, several at a time; prints what it cost and
what was left.
"""

import argparse
import asyncio
import contextlib
import ctypes
import gc
import itertools
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.churn_operations import NUM_AT_ONCE, POLL_SECONDS, Churn

CHECK_EVERY = 100


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of the process, which rests."""

    rss_bytes: int
    num_threads: int
    num_descriptors: int

    @classmethod
    def now(cls) -> "Seen":
        """Memory without garbage, and without what the allocator keeps for later."""
        gc.collect()
        with contextlib.suppress(AttributeError, OSError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)
        num_descriptors = len(list(Path("/proc/self/fd").iterdir()))
        return cls(machine.rss_bytes(), threading.active_count(), num_descriptors)


async def churn(subject: Churn, num_operations: int) -> dict[str, Any]:
    # Of a fixed size and started at once: a thread that comes later is no leak.
    pool = ThreadPoolExecutor(NUM_AT_ONCE)
    asyncio.get_running_loop().set_default_executor(pool)
    await asyncio.gather(
        *(asyncio.to_thread(time.sleep, 0.1) for _ in range(NUM_AT_ONCE))
    )
    subject.open_connections()
    start, began = Seen.now(), time.perf_counter()
    largest = await _operate(subject, num_operations // 2)
    took, half = time.perf_counter() - began, Seen.now()
    began = time.perf_counter()
    largest = max(largest, await _operate(subject, num_operations // 2))
    took, end = took + time.perf_counter() - began, Seen.now()
    tiers = subject.cache.stats()["tiers"].values()
    for name in sorted(subject.names):
        await subject.delete(name)
    return {
        "operations_per_second": num_operations / took,
        "largest_memory_bytes": largest,
        "rss_growth_bytes": end.rss_bytes - start.rss_bytes,
        "rss_growth_second_half_bytes": end.rss_bytes - half.rss_bytes,
        "evictions": sum(tier["evictions"] for tier in tiers),
        "retried": subject.num_retried,
        "in_place_encodes": subject.worker.stats()["in_place_encodes"],
        "left": {
            **subject.left(),
            "threads": end.num_threads - half.num_threads,
            "descriptors": end.num_descriptors - half.num_descriptors,
        },
    }


async def _operate(subject: Churn, num_operations: int) -> int:
    """So many operations, several at a time; returns the most bytes in memory."""
    numbers, largest = itertools.count(1), 0

    async def client() -> None:
        nonlocal largest
        while (number := next(numbers)) <= num_operations:
            await subject.operate()
            if number % CHECK_EVERY == 0:
                largest = max(largest, subject.memory_bytes())

    await asyncio.gather(*(client() for _ in range(NUM_AT_ONCE)))
    while subject.worker.stats()["in_flight"]:
        await asyncio.sleep(POLL_SECONDS)
    return max(largest, subject.memory_bytes())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("num_operations", type=int)
    parser.add_argument("memory_max_bytes", type=int)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    subject = Churn(given.directory, given.memory_max_bytes, given.seed)
    found = asyncio.run(churn(subject, given.num_operations))
    subject.storage.registry.close()
    print(json.dumps(found), flush=True)
    os._exit(0)  # the encode thread waits for jobs for ever


if __name__ == "__main__":
    main()
