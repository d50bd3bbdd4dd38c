"""What becomes of a request that vLLM has preempted: it goes on, or ends with an error.

vLLM preempts a running request when the KV cache has no block left for its next token,
keeps its tokens, and computes their KV anew when there is room. `reservation` keeps it
from coming to that. Where it does (a request that takes far longer than its text lets
expect, ``reset_prefix_cache``), a talker that cannot go on would garble the speech: its
client gets an error with the reason, and its neighbours go on.

A talker that keeps what it spoke builds those rows again; three things are the
scheduler's:

* The last token has no frame yet: its residual codes are made when it is decoded. So
  it is computed alone, as a decode step, after all that was spoken.
* KV that was computed behind a prompt is found in the prefix cache by token ids, which
  do not tell frames with the same first code apart. So only a prompt's is taken.
* Stage 1 has the frames that are computed anew. The host leaves out those before the
  last one that it sent; and the last, sent once more, would make it send its chunk
  once more.

As in vLLM itself, KV that is computed anew may differ in its last bits where a kernel
rounds otherwise for many positions than for one.
"""

import logging
import math
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.request import Request, RequestStatus

from vllm_tts_cache.throttled_log import ThrottledLog

throttled = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))

REASON = (
    "The KV cache ran out while this request was speaking, and this model cannot go on "
    "after that. Try again. For the operator: raise gpu_memory_utilization or "
    "kv_cache_memory_bytes, or lower max_num_seqs."
)


def resume_by_replay(scheduler: Any) -> None:
    """Hook a new scheduler, whose talker keeps what it spoke."""
    replay = _Replay(scheduler)
    scheduler._reserve_prefill_lookahead = replay.num_new_tokens
    scheduler._preempt_request = replay.preempt
    scheduler.kv_cache_manager.get_computed_blocks = replay.computed_blocks


class _Replay:
    def __init__(self, scheduler: Any):
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._reserve_prefill_lookahead = scheduler._reserve_prefill_lookahead
        self._preempt_request = scheduler._preempt_request
        self._get_computed_blocks = self._manager.get_computed_blocks
        managers = self._manager.coordinator.single_type_managers
        self._block_size = math.lcm(*(manager.block_size for manager in managers))

    def num_new_tokens(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """How many of so many tokens to compute in this step; 0: none of them yet."""
        num_new_tokens = self._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        last = request.num_tokens - 1
        if not request.num_output_tokens or num_computed_tokens >= last:
            return num_new_tokens
        end = min(num_computed_tokens + num_new_tokens, last)
        # A token of what was spoken, computed alone, would be spoken once more.
        if end == last - 1:
            end -= 1
        if end == num_computed_tokens + 1 and end > request.num_prompt_tokens:
            end -= 1
        return max(end - num_computed_tokens, 0)

    def computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int, int]:
        """What the prefix cache has of the request's prompt, less its last token."""
        found = self._get_computed_blocks(request)
        blocks, num_tokens, _ = found
        if not request.num_output_tokens:
            return found
        num_usable = request.num_prompt_tokens - 1
        num_usable -= num_usable % self._block_size
        if num_tokens <= num_usable:
            return found
        usable = self._manager.truncate_computed_blocks(blocks, num_usable)
        return usable, num_usable, 0

    def preempt(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """Preempt, and have stage 1 take nothing from it until it speaks again."""
        self._preempt_request(request, *args, **kwargs)
        adapter = getattr(self._scheduler, "chunk_transfer_adapter", None)
        if adapter is not None and request.num_output_tokens:
            sent = adapter.requests_num_chunks_sent
            name = request.external_req_id
            sent[name] = max(sent.get(name, 0), request.num_tokens)


def end_preempted(scheduler: Any) -> None:
    """Hook a new scheduler, whose talker cannot go on."""
    preempt, update = scheduler._preempt_request, scheduler.update_from_output
    preempted: dict[str, Request] = {}

    def preempt_request(request: Request, *args: Any, **kwargs: Any) -> None:
        preempt(request, *args, **kwargs)
        preempted[request.request_id] = request

    def update_from_output(*args: Any, **kwargs: Any) -> Any:
        # Not where it is preempted: there the scheduler walks over its queues.
        for request_id, request in preempted.items():
            if not request.is_finished():
                _end(scheduler, request_id, request)
        preempted.clear()
        return update(*args, **kwargs)

    scheduler._preempt_request = preempt_request
    scheduler.update_from_output = update_from_output


def _end(scheduler: Any, request_id: str, request: Request) -> None:
    # A cache that is too small preempts many, and each client is told for itself.
    throttled.warn_of(
        "a preempted request",
        "Request %s was preempted, and ends: %s",
        request_id,
        REASON,
    )
    # The host tells the client so of what is in here, when it takes in the output.
    told = scheduler._streaming_context_overflow
    told[request_id] = (request.client_index, REASON)
    scheduler.finish_requests(request_id, RequestStatus.FINISHED_ERROR)
