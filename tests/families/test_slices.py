"""An encode in slices of time is the whole encode, bit for bit."""

import pytest
import torch
from torch import nn

from tests.families.cases import unlike_cases
from tests.families.test_encoders import audio
from vllm_tts_cache.families.networks import slices
from vllm_tts_cache.families.networks.slices import CausalPass, in_slices, slice_lengths


@unlike_cases
@pytest.mark.parametrize(
    "rate_hz, num_samples", [(24_000, 95_999), (44_100, 44_101), (48_000, 240_007)]
)
@pytest.mark.usefixtures("one_thread")
def test_it_is_the_same_in_one(case, encoders_of, monkeypatch, rate_hz, num_samples):
    given = audio(rate_hz, num_samples)
    in_several = [e.encode(given).arrays for e in encoders_of(case).values()]
    monkeypatch.setattr(slices, "slice_lengths", lambda length, _: [length])
    in_one = [e.encode(given).arrays for e in encoders_of(case).values()]
    for one, several in zip(in_one, in_several, strict=True):
        assert {n: a.tobytes() for n, a in one.items()} == {
            n: a.tobytes() for n, a in several.items()
        }


def test_a_slice_is_never_shorter_than_asked_for_unless_the_clip_is():
    for length in range(1, 200):
        lengths = slice_lengths(length, 10)
        assert sum(lengths) == length
        assert set(lengths[:-1]) <= {10}
        assert lengths[-1] in range(min(length, 10), 20)


def test_what_is_kept_of_a_slice_is_no_longer_than_the_kernel():
    conv, causal = nn.Conv1d(4, 4, 7), CausalPass()
    with torch.inference_mode():
        causal.convolve(conv, torch.zeros(1, 4, 10_000))
    [kept] = causal._ends.values()
    assert kept.untyped_storage().nbytes() == 4 * 4 * 6


@pytest.mark.usefixtures("one_thread")
def test_there_is_a_rest_between_slices_and_none_before_or_after(monkeypatch):
    order = []
    monkeypatch.setattr(slices, "_rest_on", lambda _: lambda: order.append("rest"))

    def layers(x, _):
        order.append(x.shape[-1])
        return x

    in_slices(layers, torch.zeros(1, 1, 35), num_samples=10)
    assert order == [10, "rest", 10, "rest", 15]


def test_a_gpu_rests_for_a_share_of_what_the_slice_took(monkeypatch):
    """Where there is none: its events and the clock are stand-ins."""
    slept, now = [], iter([0.0, 0.5, 0.75, 0.8, 0.9])
    monkeypatch.setattr(slices.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(slices.time, "sleep", slept.append)
    monkeypatch.setattr(torch.cuda, "Event", FinishedEvent)
    rest = slices._rest_on(torch.device("cuda"))
    rest()
    rest()
    assert slept == pytest.approx([slices.PAUSE * seconds for seconds in (0.5, 0.05)])


class FinishedEvent:
    def __init__(self, blocking):
        assert blocking

    def record(self):
        self.is_recorded = True

    def synchronize(self):
        assert self.is_recorded
