"""Agreement between the ranks of a tensor-parallel worker."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import distributed

from vllm_tts_cache.errors import TTSCacheError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """The processes that run one model together, or the only one.

    All processes must call the same methods in the same order.

    Attributes:
        group: Their torch group for tensors on the CPU; None for a single process.
    """

    group: Any = None

    @property
    def are_several(self) -> bool:
        """Whether there is more than one."""
        return self.group is not None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which encodes for all."""
        return self.group is None or distributed.get_rank(self.group) == 0

    def all_agree(self, is_so: bool) -> bool:
        """Return whether ``is_so`` is true on every rank."""
        if self.group is None:
            return is_so
        flag = torch.tensor(int(is_so), device="cpu")
        distributed.all_reduce(flag, distributed.ReduceOp.MIN, group=self.group)
        return bool(flag.item())

    def from_rank_0(self, compute: Callable[[], T]) -> T:
        """Call ``compute`` on rank 0, and return its result, plain data, on every rank.

        Raises: On rank 0 what ``compute`` raises, on the others a `TTSCacheError` with
            its text, so that no rank waits for ever.
        """
        if self.group is None:
            return compute()
        if not self.is_first:
            result: Any = self._broadcast(None)
            if isinstance(result, TTSCacheError):
                raise result
            return result
        try:
            result = compute()
        except Exception as exc:
            self._broadcast(TTSCacheError(f"rank 0: {str(exc) or repr(exc)}"))
            raise
        self._broadcast(result)
        return result

    def _broadcast(self, value: Any) -> Any:
        values = [value]
        distributed.broadcast_object_list(
            values, group=self.group, group_src=0, device=torch.device("cpu")
        )
        return values[0]


ALONE = Ranks()


def tensor_parallel_ranks() -> Ranks:
    """Return the ranks of this worker.

    They prefill the same requests in the same order, and meet in the first layer, so a
    broadcast before it adds no waiting.
    """
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return ALONE
    group = parallel_state.get_tp_group()
    return ALONE if group.world_size == 1 else Ranks(group.cpu_group)
