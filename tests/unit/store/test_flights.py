import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.encoding_samples import make_key
from vllm_tts_cache.store.flights import FileFlights, LocalFlights


def test_threads_share_one_execution_and_its_result():
    flights, runs, gate = LocalFlights[str, object](), [], threading.Event()

    def work():
        runs.append(1)
        gate.wait(10)
        return object()

    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(flights.run, "key", work) for _ in range(8)]
        while not runs:
            time.sleep(0.001)
        assert len(flights) == 1
        time.sleep(0.05)
        gate.set()
        assert len({id(call.result(10)) for call in calls}) == 1
    assert (len(runs), len(flights)) == (1, 0)


def test_all_who_waited_get_the_failure_and_the_next_call_tries_again():
    flights, gate = LocalFlights[str, int](), threading.Event()

    def fail():
        gate.wait(10)
        raise OSError("no such clip")

    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(flights.run, "key", fail) for _ in range(4)]
        time.sleep(0.05)
        gate.set()
        for call in calls:
            with pytest.raises(OSError, match="no such clip"):
                call.result(10)
    assert flights.run("key", lambda: 7) == 7


def test_different_keys_do_not_wait_for_each_other():
    flights = LocalFlights[str, str]()
    assert flights.run("a", lambda: flights.run("b", lambda: "b")) == "b"


def test_one_turn_at_a_time(tmp_path):
    order, flights = [], FileFlights(tmp_path, poll_seconds=0.001)

    def work(n):
        with flights.turn(make_key(), 10) as has_turn:
            order.append(n)
            time.sleep(0.01)
            order.append(n)
            return has_turn

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    assert order[::2] == order[1::2]


def test_who_waits_too_long_goes_on_without_a_turn(tmp_path):
    flights = FileFlights(tmp_path, poll_seconds=0.001)

    def impatient():
        with flights.turn(make_key(), 0.02) as has_turn:
            return has_turn

    with flights.turn(make_key(), 1) as first, ThreadPoolExecutor(1) as pool:
        assert (first, pool.submit(impatient).result(10)) == (True, False)
    assert impatient() is True


def test_a_failing_block_gives_its_turn_back(tmp_path):
    flights = FileFlights(tmp_path)
    with pytest.raises(KeyError), flights.turn(make_key(), 1):
        raise KeyError
    with flights.turn(make_key(), 0) as has_turn:
        assert has_turn


def test_a_nested_turn_on_the_same_stripe_does_not_hang(tmp_path):
    flights = FileFlights(tmp_path)
    with flights.turn(make_key(), 1), flights.turn(make_key(), 0.1) as nested:
        assert nested is False


def test_lock_files_are_bounded(tmp_path):
    flights = FileFlights(tmp_path)
    for n in range(600):
        with flights.turn(make_key(n), 1):
            pass
    assert 200 < len(list(tmp_path.iterdir())) <= 256


def test_a_broken_lock_directory_warns_once_and_stops_nobody(tmp_path, caplog):
    (tmp_path / "locks").write_text("a file where the directory should be")
    flights = FileFlights(tmp_path / "locks")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with flights.turn(make_key(), 1) as has_turn:
                assert has_turn is False
    assert len(caplog.records) == 1
