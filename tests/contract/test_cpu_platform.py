"""What our CPU platform changes in torch, and where it does not."""

import pytest
import torch

from vllm_tts_cache.platforms.cpu import (
    forgive_emptying_no_cache,
    say_that_nothing_is_captured,
)


@pytest.fixture
def hosts_call(monkeypatch):
    def raises():
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "empty_cache", raises)
    return raises


def test_emptying_the_cache_of_no_accelerator_does_nothing(hosts_call, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(RuntimeError):
        torch.accelerator.empty_cache()
    forgive_emptying_no_cache()
    torch.accelerator.empty_cache()


def test_an_accelerators_cache_is_left_to_it(hosts_call, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    forgive_emptying_no_cache()
    assert torch.accelerator.empty_cache is hosts_call


@pytest.fixture
def hosts_question(monkeypatch):
    def raises():
        raise RuntimeError("Tried to instantiate dummy base class")

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", raises)
    return raises


def test_nothing_is_captured_in_a_build_without_cuda(hosts_question, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    say_that_nothing_is_captured()
    assert torch.cuda.is_current_stream_capturing() is False


def test_a_build_with_cuda_answers_for_itself(hosts_question, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    say_that_nothing_is_captured()
    assert torch.cuda.is_current_stream_capturing is hosts_question
