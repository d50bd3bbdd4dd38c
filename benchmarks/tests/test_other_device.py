"""The device that is not there refuses what a card would, and computes as a CPU."""

import pytest
import torch
from torch.nn import functional

from benchmarks.gpu_check.other_device import another_device, move


@pytest.fixture(params=[torch.no_grad, torch.inference_mode])
def there(request):
    with request.param(), another_device() as device:
        yield device


HERE = torch.arange(12.0).view(3, 4)
ROWS = torch.tensor([0, 2])
REFUSED = {
    "added": lambda there: there + HERE,
    "multiplied": lambda there: HERE @ there.T,
    "joined": lambda there: torch.cat([there, HERE]),
    "joined with a number": lambda there: torch.stack([there[0, 0], HERE[0, 0]]),
    "looked up": lambda there: functional.embedding(ROWS, there),
    "picked out of a CPU's": lambda there: HERE[there[:2, 0].long()],
    "convolved": lambda there: functional.conv1d(
        there.view(3, 1, 4), HERE.view(3, 1, 4)
    ),
    "chosen": lambda there: torch.where(HERE > 3, there, there),
    "written": lambda there: there.__setitem__(ROWS, HERE[:2]),
    "read without a copy": lambda there: there.numpy(),
}


@pytest.mark.parametrize("act", REFUSED.values(), ids=REFUSED)
def test_what_meets_a_cpus_tensor_is_refused(there, act):
    with pytest.raises((RuntimeError, TypeError)):
        act(HERE.to(there))


ALLOWED = {
    "scaled": lambda x: x * torch.tensor(2.0) + 1,
    "cut": lambda x: x[1:, ::2],
    "picked": lambda x: x[ROWS],
    "masked": lambda x: x[x > 3],
    "turned": lambda x: x.T.contiguous().view(-1),
    "counted": lambda x: torch.arange(int(x[1, 0]), device=x.device),
    "made like it": lambda x: x.new_tensor([x[1, 1].item()]),
    "attended": lambda x: functional.scaled_dot_product_attention(x, x, x),
}


@pytest.mark.parametrize("act", ALLOWED.values(), ids=ALLOWED)
def test_what_does_not_is_there_and_has_a_cpus_numbers(there, act):
    made = act(HERE.to(there))
    assert made.device == there
    assert torch.equal(made.cpu(), act(HERE))


def test_a_copy_shares_nothing_with_what_it_was_copied_from(there):
    here = torch.zeros(3)
    copied = here.pin_memory().to(there, non_blocking=True)
    back = copied.cpu()
    copied.add_(1)
    copied[0] = 5
    assert here.tolist() == back.tolist() == [0, 0, 0]
    assert copied.tolist() == copied.to("cpu").tolist() == [5, 1, 1]


def test_a_module_is_moved_with_what_it_has_besides_its_parameters(there):
    network = torch.nn.Conv1d(4, 4, 3).requires_grad_(False)
    network.offsets = torch.ones(4, 1)

    def compute(x):
        return network(x) + network.offsets

    expected = compute(HERE.unsqueeze(-1).expand(3, 4, 5))
    move(network)
    given = HERE.to(there).unsqueeze(-1).expand(3, 4, 5)
    assert torch.equal(compute(given).cpu(), expected)
