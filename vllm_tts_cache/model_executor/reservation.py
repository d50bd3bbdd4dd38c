"""Starts a request of a talker that cannot resume only when it fits to its end.

vLLM preempts a running request when the KV cache has no block left for its next token,
and later computes its tokens anew. Where a position is more than its token, and the
host keeps what it is elsewhere, that is lost. So where vLLM admits a request of such a
family, the free blocks must hold all that it can take, beside what the running ones can
still take. Then no running request is ever short of a block. A family that can go on
costs nothing of that: see `preemption`.

What a request can take is its prompt and ``max_tokens``. Few take a tenth of that, so a
family may say what a text plausibly takes; a request that takes longer counts with its
worst case from then on, and new ones wait. Were that not enough, the newest request
would end as an error: see `preemption`.

Only admission changes: a request that must wait keeps its place in the queue, as when
vLLM itself has no blocks for it. With nothing running vLLM decides alone, so nothing
waits for ever. It checks at start that the cache holds one request of ``max_model_len``
beside the null block (``get_kv_cache_configs`` in ``v1/core/kv_cache_utils.py``).

Of a model that is guided, two requests speak one text. The host's scheduler for such
models reserves all that both can take, so it is left alone: a no to one of the two
would end the engine.
"""

import logging
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request, RequestStatus
from vllm_omni.core.sched.omni_ar_scheduler import OmniARScheduler
from vllm_omni.core.sched.omni_cfg_ar_scheduler import OmniCFGARScheduler

from vllm_tts_cache.model_executor.preemption import end_preempted, resume_by_replay
from vllm_tts_cache.speaker.family import family_of_model

logger = logging.getLogger("vllm.vllm_tts_cache")

_ADMISSIBLE = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
_MAX_TEXTS = 1024
_MARK = "_vllm_tts_cache_reserves"


def install() -> None:
    """Let every scheduler made from now on preempt without harm; twice is once."""
    host_init = OmniARScheduler.__init__
    if hasattr(host_init, _MARK):
        return

    @wraps(host_init)
    def init(self: OmniARScheduler, *args: Any, **kwargs: Any) -> None:
        host_init(self, *args, **kwargs)
        architectures = self.vllm_config.model_config.architectures
        if (family := family_of_model(*architectures)) is None:
            return
        if family.resumes:
            resume_by_replay(self)
        else:
            end_preempted(self)
            if not isinstance(self, OmniCFGARScheduler):
                reserve_blocks(self, family.plausible_tokens)

    setattr(init, _MARK, True)
    OmniARScheduler.__init__ = init


def reserve_blocks(
    scheduler: Any, plausible_tokens: Callable[[str], int] | None = None
) -> None:
    """Hook a new scheduler whose KV cache is not ample.

    Args:
        scheduler: Of a family that does not resume.
        plausible_tokens: As that family has it.
    """
    allocator = ReservingAllocator(scheduler, plausible_tokens)
    num_fitting = allocator.num_longest_requests()
    if num_fitting >= scheduler.max_num_running_reqs:
        return
    scheduler.kv_cache_manager.allocate_slots = allocator
    logger.warning(
        "The KV cache holds %d of the max_num_seqs=%d requests of max_model_len=%d "
        "tokens. A request of this model waits until the cache can hold its prompt "
        "and %s to the end. For more requests at a time raise gpu_memory_utilization "
        "or kv_cache_memory_bytes, or lower max_model_len or the requests' max_tokens.",
        num_fitting,
        scheduler.max_num_running_reqs,
        scheduler.max_model_len,
        "max_tokens" if plausible_tokens is None else "what its text plausibly takes",
    )


class ReservingAllocator:
    """``KVCacheManager.allocate_slots`` that also says no to an unsafe start."""

    def __init__(
        self,
        scheduler: Any,
        plausible_tokens: Callable[[str], int] | None = None,
    ):
        self._scheduler = scheduler
        self._plausible_tokens = None
        if plausible_tokens is not None:  # asked of every running request in each step
            self._plausible_tokens = lru_cache(_MAX_TEXTS)(plausible_tokens)
        self._manager = scheduler.kv_cache_manager
        self._allocate_slots = self._manager.allocate_slots
        config = scheduler.vllm_config
        # Steps in flight are scheduled before it is known that a request has ended.
        self._max_overrun_tokens = (
            config.max_concurrent_batches * (1 + scheduler.num_spec_tokens)
            + scheduler.num_lookahead_tokens
        )
        groups = scheduler.kv_cache_config.kv_cache_groups
        self._shares_blocks = (
            len(groups) == 1 and type(groups[0].kv_cache_spec) is FullAttentionSpec
        )

    def __call__(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """The new blocks, or ``None``: "not now" to a request that would start."""
        if request.status in _ADMISSIBLE and not self._may_start(
            request,
            kwargs.get("new_computed_blocks"),
            kwargs.get("num_new_computed_tokens", 0),
        ):
            return None
        return self._allocate_slots(request, *args, **kwargs)

    def num_longest_requests(self) -> int:
        """How many requests of ``max_model_len`` the blocks free now hold."""
        # No request has this id: nothing of it is allocated yet.
        num_blocks = self._num_blocks_to_allocate("", self._scheduler.max_model_len)
        return self._manager.block_pool.get_num_free_blocks() // num_blocks

    def num_tokens_reserved(self, request: Request) -> int:
        """The positions of the KV cache that a request counts with."""
        worst = self._max_tokens_held(request)
        text = None if self._plausible_tokens is None else _text_of(request)
        if self._plausible_tokens is None or not text or request.resumable:
            return worst
        ends_at = request.num_prompt_tokens + self._plausible_tokens(text)
        plausible = ends_at + self._max_overrun_tokens
        return worst if request.num_tokens > plausible else min(plausible, worst)

    def _max_tokens_held(self, request: Request) -> int:
        """The positions that a request can take in the KV cache, at worst."""
        max_model_len = self._scheduler.max_model_len
        # A session's next input brings its own prompt and max_tokens.
        if request.resumable:
            return max_model_len
        ends_at = request.num_prompt_tokens + request.max_tokens
        return min(ends_at + self._max_overrun_tokens, max_model_len)

    def _may_start(
        self, request: Request, hit_blocks: KVCacheBlocks | None, num_hit_tokens: int
    ) -> bool:
        running = self._scheduler.running
        if not running:
            return True
        num_reserved = sum(self._num_blocks_missing(other) for other in running)
        num_free = self._manager.block_pool.get_num_free_blocks()
        if not self._shares_blocks:
            hit_blocks, num_hit_tokens = None, 0
        num_missing = self._num_blocks_missing(request, hit_blocks, num_hit_tokens)
        return num_reserved + num_missing <= num_free

    def _num_blocks_missing(
        self,
        request: Request,
        hit_blocks: KVCacheBlocks | None = None,
        num_hit_tokens: int = 0,
    ) -> int:
        return self._num_blocks_to_allocate(
            request.request_id,
            self.num_tokens_reserved(request),
            hit_blocks,
            request.num_computed_tokens + num_hit_tokens,
        )

    def _num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        hit_blocks: KVCacheBlocks | None = None,
        num_computed_tokens: int = 0,
    ) -> int:
        """Free blocks that it takes to hold so much of a request, beyond its own."""
        blocks = (
            self._manager.empty_kv_cache_blocks if hit_blocks is None else hit_blocks
        )
        return self._manager.coordinator.get_num_blocks_to_allocate(
            request_id=request_id,
            num_tokens=num_tokens,
            new_computed_blocks=blocks.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=num_computed_tokens,
            num_local_computed_tokens=num_computed_tokens,
            num_tokens_main_model=num_tokens,
        )


def _text_of(request: Any) -> str | None:
    """Return what a request speaks, where the host's adapters put it."""
    info = getattr(request, "additional_information", None)
    text = (getattr(info, "entries", None) or info or {}).get("text")
    text = getattr(text, "list_data", None) or getattr(text, "scalar_data", text)
    if isinstance(text, list):
        text = next(iter(text), None)
    return text if isinstance(text, str) else None
