import threading

import numpy as np
import pytest
import torch

from tests.encoding_samples import assert_same, make_key
from vllm_tts_cache.catalogue.segment import Segment
from vllm_tts_cache.errors import EncodeError
from vllm_tts_cache.model_executor import encode_queue
from vllm_tts_cache.model_executor.encode_queue import EncodeJob, EncodeQueue
from vllm_tts_cache.store.encoding import Encoding

CPU = torch.device("cpu")
WAIT = 10.0


class Encoder:
    """Encodes when the gate is open; a job whose name is in ``bad`` fails."""

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.bad = set()
        self.done = []
        self.threads = set()

    def __call__(self, job):
        self.threads.add(threading.current_thread())
        self.entered.release()
        assert self.gate.wait(WAIT)
        if job.encoder_name in self.bad:
            raise EncodeError(f"{job.encoder_name} cannot")
        self.done.append(job.encoder_name)
        return encoding_of(job)


def encoding_of(job):
    return Encoding({"name": np.array([job.encoder_name.encode()]).view(np.uint8)})


def queue_of(encode):
    return EncodeQueue(encode, CPU, yield_seconds=0.1)


@pytest.fixture
def encoder():
    return Encoder()


@pytest.fixture
def jobs(encoder):
    return queue_of(encoder)


def job(name="a"):
    return EncodeJob(
        key=make_key(encoder=name), encoder_name=name, segment=Segment.REGISTERED
    )


def test_no_thread_starts_before_the_first_job(encoder):
    before = threading.active_count()
    queue_of(encoder)
    assert threading.active_count() == before


def test_jobs_run_in_their_order_on_one_other_thread(jobs, encoder):
    flights = [jobs.submit(job(name)) for name in "abc"]
    for flight in flights:
        flight.result(WAIT)
    assert encoder.done == ["a", "b", "c"]
    (thread,) = encoder.threads
    assert thread is not threading.current_thread()
    assert thread.daemon


def test_a_flight_carries_what_was_encoded(jobs):
    for name in "ab":
        found = jobs.submit(job(name)).result(WAIT)
        assert_same(found, encoding_of(job(name)))


def test_callers_of_one_key_share_one_flight(jobs, encoder):
    encoder.gate.clear()
    flights, barrier = [], threading.Barrier(8)

    def call():
        barrier.wait(WAIT)
        flights.append(jobs.submit(job()))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert len(set(map(id, flights))) == 1
    encoder.gate.set()
    flights[0].result(WAIT)
    assert encoder.done == ["a"]


def test_submitting_does_not_wait_and_what_is_under_way_is_known(jobs, encoder):
    encoder.gate.clear()
    first, second = jobs.submit(job("a")), jobs.submit(job("b"))
    assert encoder.entered.acquire(timeout=WAIT)
    assert jobs.num_in_flight == 2
    assert jobs.in_flight(job("a").key)
    assert jobs.in_flight(job("b").key)
    encoder.gate.set()
    first.result(WAIT)
    second.result(WAIT)
    assert jobs.num_in_flight == 0
    assert not jobs.in_flight(job("a").key)


def test_a_key_that_landed_can_fly_again(jobs, encoder):
    jobs.submit(job()).result(WAIT)
    jobs.submit(job()).result(WAIT)
    assert encoder.done == ["a", "a"]


def test_a_failure_is_raised_remembered_and_not_in_flight(jobs, encoder):
    encoder.bad = {"a"}
    with pytest.raises(EncodeError, match="a cannot"):
        jobs.submit(job()).result(WAIT)
    assert jobs.failure(job().key) == "a cannot"
    assert not jobs.in_flight(job().key)
    assert jobs.failure(job("b").key) is None


def test_a_failure_is_forgotten_when_its_key_is_tried_again(jobs, encoder):
    encoder.bad = {"a"}
    with pytest.raises(EncodeError):
        jobs.submit(job()).result(WAIT)
    encoder.bad, again = set(), job()
    encoder.gate.clear()
    flight = jobs.submit(again)
    assert jobs.failure(again.key) is None
    encoder.gate.set()
    flight.result(WAIT)
    assert jobs.failure(again.key) is None


def test_the_thread_outlives_failures(jobs, encoder):
    encoder.bad = {"a"}
    for _ in range(3):
        with pytest.raises(EncodeError):
            jobs.submit(job("a")).result(WAIT)
    jobs.submit(job("b")).result(WAIT)
    assert len(encoder.threads) == 1


def test_an_error_without_text_still_has_a_reason():
    def fail(_job):
        raise RuntimeError

    jobs = queue_of(fail)
    with pytest.raises(RuntimeError):
        jobs.submit(job()).result(WAIT)
    assert jobs.failure(job().key) == "RuntimeError()"


def test_failures_are_remembered_up_to_a_number(jobs, encoder, monkeypatch):
    monkeypatch.setattr(encode_queue, "MAX_REMEMBERED_FAILURES", 2)
    encoder.bad = set("abc")
    for name in "abc":
        with pytest.raises(EncodeError):
            jobs.submit(job(name)).result(WAIT)
    assert [jobs.failure(job(name).key) for name in "abc"] == [
        None,
        "b cannot",
        "c cannot",
    ]


def test_the_thread_records_no_gradients_and_the_callers_settings_stay():
    seen = []

    def encode(job):
        seen.append(torch.is_inference_mode_enabled())
        return encoding_of(job)

    queue_of(encode).submit(job()).result(WAIT)
    assert seen == [True]
    assert not torch.is_inference_mode_enabled()
