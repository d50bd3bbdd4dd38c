import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm_tts_cache.logs import INTERVAL_SECONDS, ThrottledLog

logger = logging.getLogger("tests.throttled")


@pytest.fixture(autouse=True)
def heard(caplog, monkeypatch):
    """Hear the logger itself: once vLLM is imported, not all of it reaches the root."""
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "disabled", False)
    monkeypatch.setattr(logger, "level", logging.WARNING)


@pytest.fixture
def log():
    """A log whose clock stands still until ``log.wait`` moves it."""

    class Clocked(ThrottledLog):
        now = 1000.0

        def __init__(self):
            super().__init__(lambda: self.now)

        def wait(self, seconds):
            self.now += seconds

    return Clocked()


def test_after_a_minute_the_next_line_counts_what_was_left_out(log, caplog):
    for n in range(4):
        log.warn_of("disk", "Reading %d", n)
    log.wait(INTERVAL_SECONDS - 0.1)
    log.warn_of("disk", "Reading %d", 4)
    log.wait(0.1)
    log.warn_of("disk", "Reading %d", 5)
    log.wait(INTERVAL_SECONDS)
    log.warn_of("disk", "Reading %d", 6)
    assert caplog.messages == [
        "Reading 0",
        "Reading 5 (4 more like this were not logged)",
        "Reading 6",
    ]


def test_a_message_without_values_may_hold_a_percent_sign(log, caplog):
    log.warn_of("disk", "100% full")
    log.warn_of("disk", "100% full")
    log.wait(INTERVAL_SECONDS)
    log.warn_of("disk", "100% full")
    left_out = "(1 more like this were not logged)"
    assert caplog.messages == ["100% full", f"100% full {left_out}"]
    assert caplog.records[0].filename == "test_throttled_log.py"


def test_many_causes_take_bounded_memory(log, caplog):
    for n in range(10_000):
        log.warn_of(f"voice {n}", "Reading")
    assert len(log._causes) <= 256


def test_threads_that_fail_together_write_one_line_and_lose_no_count(log, caplog):
    together = threading.Barrier(8)

    def fail(_):
        together.wait()
        for _ in range(200):
            log.warn_of("disk", "Reading")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fail, range(8)))
    log.wait(INTERVAL_SECONDS)
    log.warn_of("disk", "Reading")
    left_out = "(1599 more like this were not logged)"
    assert caplog.messages == ["Reading", f"Reading {left_out}"]
