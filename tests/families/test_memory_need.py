"""What an encoder says that it takes of a device's memory is what it takes.

Counted on a CPU, where a test can: the tensors that are there at a time. A GPU's
workspaces come on top, and `EncodeDevice` leaves a margin for them.
"""

import pytest
import torch

from benchmarks.gpu_check.clips import noise
from benchmarks.gpu_check.memory import MIB, TensorBytes, peak_bytes
from tests.families.cases import every_case
from tests.torch_threads import on_threads
from vllm_tts_cache.speaker.reference_encoder import MemoryNeed

CPU = torch.device("cpu")


@pytest.fixture
def one_thread():
    """As the encode thread has: on several, a CPU encodes without slices."""
    with on_threads(1):
        yield


@every_case
@pytest.mark.parametrize("seconds", [1.0, 1.9, 3.9, 10.0])
@pytest.mark.usefixtures("one_thread")
def test_no_encode_takes_more_than_its_encoder_says(case, tiny, seconds):
    """The tiny ones: a need is that of the released size, and as much as it is wide."""
    clip = noise(seconds)
    for encoder in case.family.part("encoders_part")(tiny(case.family), CPU).values():
        measured = peak_bytes(CPU, lambda encoder=encoder: encoder.encode(clip))
        declared = encoder.need.of(seconds)
        assert measured <= declared, f"{encoder.name}: {measured / MIB:.1f} MiB"
        if seconds == 10.0:
            assert declared <= 10 * measured, f"{encoder.name} says far too much"


def test_a_need_is_a_line_and_grows_with_the_network():
    need = MemoryNeed(fixed_bytes=100, bytes_per_second=10)
    assert [need.of(seconds) for seconds in (0, 0.05, 3)] == [100, 101, 130]
    assert need.scaled(0.125) == MemoryNeed(fixed_bytes=13, bytes_per_second=2)


# -------- the counting


def counted(act):
    with TensorBytes() as bytes_:
        kept = act()
    return bytes_, kept


def test_what_is_there_at_a_time_is_counted_and_what_is_gone_is_not():
    def act():
        big = torch.zeros(1_000)
        del big
        return torch.zeros(10)

    found, kept = counted(act)
    assert (found.peak, found.now) == (4_000, 40)
    assert kept.numel() == 10


def test_views_and_results_in_place_take_nothing_more():
    found, _ = counted(lambda: torch.zeros(4, 8).view(32).add_(1.0)[3:])
    assert (found.peak, found.now) == (128, 128)


def test_what_came_from_outside_is_not_counted():
    weight = torch.zeros(1_000)
    found, _ = counted(lambda: weight.mul_(2.0).view(10, 100))
    assert (found.peak, found.now) == (0, 0)
    assert weight.sum() == 0


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_operations_that_are_made_of_others_show_what_these_take(mode):
    """In inference mode torch hands them over whole."""
    x = torch.zeros(1, 4, 100)
    conv = torch.nn.Conv1d(4, 4, 1, padding="same")

    def act():
        with mode():
            return torch.nn.functional.layer_norm(conv(x), (100,))

    found, kept = counted(act)
    assert found.peak >= 2 * kept.numel() * 4
