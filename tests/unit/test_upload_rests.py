"""One upload beside streams is done at once; many leave streams alone in between."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm_tts_cache.entrypoints.upload_rests import FACTOR, MAX_SECONDS, UploadRests

WORK_SECONDS = 0.1


class Streams:
    """Speaks until it is told not to."""

    def __init__(self):
        self.are_running = True
        self.num_looks = 0

    def __call__(self):
        self.num_looks += 1
        return self.are_running


class Clock:
    """Goes on by itself, and at once where it is told to."""

    def __init__(self):
        self.ahead = 0.0

    def __call__(self):
        return time.monotonic() + self.ahead

    def pass_seconds(self, seconds):
        self.ahead += seconds


@pytest.fixture
def streams():
    return Streams()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def rests(streams, clock):
    return UploadRests(streams, clock)


def begun(rests, clock):
    return rests.run(clock)


def test_the_first_upload_waits_for_nothing(rests, streams):
    assert rests.run(sum, (1, 2)) == 3
    assert streams.num_looks == 0


def test_beside_streams_the_next_one_begins_after_a_rest(rests, clock):
    rests.run(clock.pass_seconds, WORK_SECONDS)
    ended = clock()
    assert begun(rests, clock) - ended >= FACTOR * WORK_SECONDS * 0.99


def test_a_failed_upload_is_followed_by_a_rest_as_well(rests, clock):
    def fail():
        clock.pass_seconds(WORK_SECONDS)
        raise ValueError("no clip")

    with pytest.raises(ValueError, match="no clip"):
        rests.run(fail)
    ended = clock()
    assert begun(rests, clock) - ended >= FACTOR * WORK_SECONDS * 0.99


def test_the_longest_upload_is_followed_by_a_bounded_rest(rests, streams, clock):
    rests.run(clock.pass_seconds, 100 * MAX_SECONDS)
    clock.pass_seconds(MAX_SECONDS)
    rests.run(sum, ())
    assert streams.num_looks == 0


def test_while_nobody_speaks_nothing_rests(rests, streams, clock):
    streams.are_running = False
    rests.run(clock.pass_seconds, MAX_SECONDS)
    rests.run(sum, ())
    assert streams.num_looks == 1


def stop_streams(_rests, streams):
    streams.are_running = False


def stop_server(rests, _streams):
    rests.end()


@pytest.mark.parametrize("stop", [stop_streams, stop_server])
def test_a_rest_ends_with_what_it_is_for(rests, streams, clock, stop):
    rests.run(clock.pass_seconds, MAX_SECONDS)
    clock.pass_seconds(-1_000)  # else it would be over in seconds
    threading.Timer(0.05, stop, (rests, streams)).start()
    assert rests.run(sum, (1, 2)) == 3


def test_a_rest_holds_up_its_own_thread_only(rests, streams, clock):
    rests.run(clock.pass_seconds, MAX_SECONDS)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(rests.run, sum, (1, 2)).result() == 3
    assert streams.num_looks == 0
