"""One answer for all ranks of a tensor-parallel worker."""

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed


def all_tensor_parallel_ranks() -> Callable[[bool], bool]:
    """Return what tells whether all ranks of this worker say yes.

    They prefill the same requests in the same order, and meet in the first layer
    anyway, so a word before it costs no waiting.
    """
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    return bool if group.world_size == 1 else all_of_group(group.cpu_group)


def all_of_group(group: Any) -> Callable[[bool], bool]:
    """Return what tells whether all processes of a torch group say yes.

    Every process must call it as often, and in the same order.
    """

    def all_say(is_so: bool) -> bool:
        said = torch.tensor(int(is_so))
        distributed.all_reduce(said, distributed.ReduceOp.MIN, group=group)
        return bool(said.item())

    return all_say
