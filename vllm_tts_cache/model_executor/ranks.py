"""One answer for all ranks of a tensor-parallel worker."""

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

    Every process must call each method as often, and in the same order.

    Attributes:
        group: Their torch group for tensors on the CPU; None of a process alone.
    """

    group: Any = None

    @property
    def are_several(self) -> bool:
        """Whether there are others."""
        return self.group is not None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which encodes for all."""
        return self.group is None or distributed.get_rank(self.group) == 0

    def all_agree(self, is_so: bool) -> bool:
        """Tell whether all of them say yes."""
        if self.group is None:
            return is_so
        said = torch.tensor(int(is_so), device="cpu")
        distributed.all_reduce(said, distributed.ReduceOp.MIN, group=self.group)
        return bool(said.item())

    def from_rank_0(self, say: Callable[[], T]) -> T:
        """Call ``say`` on rank 0, and return what it says on every rank.

        Args:
            say: Returns plain data.

        Raises: On rank 0 what ``say`` raises, on the others a `TTSCacheError` of it:
            one that waited for the others would wait for ever.
        """
        if self.group is None:
            return say()
        if not self.is_first:
            result: T = self._told(None)
            return result
        try:
            result = say()
        except Exception as exc:
            self._told(TTSCacheError(f"rank 0: {str(exc) or repr(exc)}"))
            raise
        self._told(result)
        return result

    def _told(self, word: Any) -> Any:
        words = [word]
        distributed.broadcast_object_list(
            words, group=self.group, group_src=0, device=torch.device("cpu")
        )
        if isinstance(words[0], TTSCacheError) and not self.is_first:
            raise words[0]
        return words[0]


ALONE = Ranks()


def tensor_parallel_ranks() -> Ranks:
    """Return the ranks of this worker.

    They prefill the same requests in the same order, and meet in the first layer
    anyway, so a word before it costs no waiting.
    """
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return ALONE
    group = parallel_state.get_tp_group()
    return ALONE if group.world_size == 1 else Ranks(group.cpu_group)
