import threading

import pytest
import typer

from vllm_tts_cache.entrypoints.cli.voices import bulk
from vllm_tts_cache.errors import (
    RouteMissingError,
    ServerAnswerError,
    ServerUnreachableError,
)

BUSY = ServerAnswerError(503, "busy", retry_after_seconds=0)
GONE = ServerUnreachableError("http://s", "refused")


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(bulk, "_FIRST_WAIT_SECONDS", 0.001)


def failing(*errors):
    left = list(errors)

    def call():
        if left:
            raise left.pop(0)
        return "answer"

    return call


def done(items, work, num_jobs=1):
    return bulk.in_parallel(items, work, title="", num_jobs=num_jobs)


def good(item, stop):
    return bulk.Outcome(name=str(item), outcome="added")


def test_a_busy_and_a_lost_server_are_called_again():
    assert bulk.patiently(failing(BUSY, BUSY, GONE, BUSY), stop=bulk.Stop()) == "answer"


@pytest.mark.parametrize(
    "errors",
    (
        [ServerAnswerError(400, "no clip")],
        [GONE] * 4,
        [ServerAnswerError(503, "busy", retry_after_seconds=3600)],
    ),
    ids=("a refusal", "a server that stays away", "one to come back to too late"),
)
def test_what_gets_no_better_is_not_tried_again(errors):
    with pytest.raises(type(errors[-1])) as raised:
        bulk.patiently(failing(*errors), stop=bulk.Stop())
    assert raised.value is errors[-1]


def test_who_waits_for_a_busy_server_is_stopped_at_once():
    stop = bulk.Stop()
    stop.set()
    with pytest.raises(bulk.StoppedError):
        bulk.patiently(failing(ServerAnswerError(503, "busy", 60)), stop=stop)


@pytest.mark.parametrize(
    ("error", "status"),
    (
        (GONE, 3),
        (RouteMissingError(405, "POST", "/x"), 1),
        (ServerAnswerError(401, "who are you"), 1),
    ),
)
def test_what_all_would_be_told_is_told_once(error, status, capsys):
    calls = []

    def work(item, stop):
        calls.append(item)
        if item == 3:
            raise error
        return good(item, stop)

    many = done(range(100), work)
    assert calls == [0, 1, 2, 3]
    assert many.counts == {"added": 3, "not_tried": 97}
    with pytest.raises(typer.Exit) as left:
        many.report("voices", as_json=False, hint="Again.")
    assert left.value.exit_code == status
    printed = capsys.readouterr()
    assert printed.out == "3 added, 97 not tried\n"
    assert printed.err.endswith("Again.\n") is (error is GONE)
    assert str(error) in printed.err


def test_no_more_than_so_many_are_done_at_once():
    lock, most, now = threading.Lock(), 0, 0
    barrier = threading.Barrier(3, timeout=10)

    def work(item, stop):
        nonlocal most, now
        with lock:
            now += 1
            most = max(most, now)
        barrier.wait()  # three come together, or nobody goes on
        with lock:
            now -= 1
        return good(item, stop)

    assert done(range(9), work, num_jobs=3).counts == {"added": 9}
    assert most == 3
