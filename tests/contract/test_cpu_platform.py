"""What our CPU platform changes in torch, and where it does not."""

import pytest
import torch

from vllm_tts_cache.platforms.cpu import forgive_emptying_no_cache


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
