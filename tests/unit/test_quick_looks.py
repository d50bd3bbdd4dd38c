import threading

import pytest

from vllm_tts_cache.entrypoints.quick_looks import (
    NUM_SLOW,
    SLOW_SECONDS,
    THREADED_PER_SLOW,
    QuickLooks,
)


class Disk:
    """A clock that goes on by what each look takes."""

    def __init__(self):
        self.now = 0.0
        self.seconds = 0.0

    def look(self):
        self.now += self.seconds
        return threading.current_thread() is threading.main_thread()


@pytest.fixture
def disk():
    return Disk()


@pytest.fixture
def looks(disk):
    return QuickLooks(clock=lambda: disk.now)


async def slow(disk, looks, seconds=2 * SLOW_SECONDS):
    disk.seconds = seconds
    on_loop = await looks.run(disk.look)
    disk.seconds = 0.0
    return on_loop


async def test_a_quick_look_is_on_the_loop(disk, looks):
    for _ in range(10):
        assert await looks.run(disk.look)


async def test_what_a_look_raises_is_raised(looks):
    with pytest.raises(LookupError):
        await looks.run(lambda: {}["nothing"])


async def test_slow_looks_in_a_row_send_the_next_ones_to_a_thread(disk, looks):
    for _ in range(NUM_SLOW):
        assert await slow(disk, looks)
    assert not await slow(disk, looks)
    assert not await looks.run(disk.look)


async def test_slow_looks_with_quick_ones_between_stay_on_the_loop(disk, looks):
    for _ in range(10):
        assert await slow(disk, looks)
        assert await looks.run(disk.look)


async def test_a_disk_that_stays_slow_holds_up_a_thousandth_of_the_time(disk, looks):
    held_up = 0.0
    while disk.now < 1000.0:
        disk.now += 0.01
        if await slow(disk, looks, 0.02):
            held_up += 0.02
    assert 0 < held_up <= 1.1 * disk.now / THREADED_PER_SLOW


async def test_a_look_that_fails_slowly_counts_as_slow(disk, looks):
    def fail():
        disk.look()
        raise OSError

    disk.seconds = 1.0
    for _ in range(NUM_SLOW):
        with pytest.raises(OSError):
            await looks.run(fail)
    assert not await looks.run(disk.look)
