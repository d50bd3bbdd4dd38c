import threading

import pytest

from vllm_tts_cache.errors import StorageError
from vllm_tts_cache.model_executor import speakers
from vllm_tts_cache.model_executor.speakers import Recency

WAIT = 10.0


class Catalogue:
    def __init__(self):
        self.batches = []
        self.came = threading.Event()
        self.errors = []

    def used(self, shas):
        if self.errors:
            raise self.errors.pop()
        self.batches.append(shas)
        self.came.set()


@pytest.fixture
def catalogue():
    return Catalogue()


@pytest.fixture
def noted(catalogue):
    noted = Recency(catalogue.used, flush_seconds=0.01)
    yield noted
    noted.close()


def test_the_thread_starts_with_the_first_use_and_hands_on_by_itself(noted, catalogue):
    before = threading.active_count()
    noted.note("a")
    assert threading.active_count() == before + 1
    assert catalogue.came.wait(WAIT)
    catalogue.came.clear()
    noted.note("b")
    assert catalogue.came.wait(WAIT)
    assert catalogue.batches == [["a"], ["b"]]


@pytest.mark.parametrize("error", [StorageError("busy"), RuntimeError("a bug")])
def test_a_catalogue_that_fails_costs_one_batch(catalogue, error):
    noted = Recency(catalogue.used, flush_seconds=WAIT)
    catalogue.errors = [error]
    for sha in "ab":
        noted.note(sha)
        noted.flush()
    noted.close()
    assert catalogue.batches == [["b"]]


def test_more_audios_than_a_batch_holds_are_left_for_the_next(catalogue, monkeypatch):
    monkeypatch.setattr(speakers, "MAX_NOTED", 2)
    noted = Recency(catalogue.used, flush_seconds=WAIT)
    for sha in "abc":
        noted.note(sha)
    noted.flush()
    noted.note("c")
    noted.flush()
    noted.close()
    assert catalogue.batches == [["a", "b"], ["c"]]
