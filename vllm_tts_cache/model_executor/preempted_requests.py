"""Ends a request that vLLM has preempted and that cannot go on, rather than garble it.

`reservation` keeps it from coming to that. Where it does (a request that takes far
longer than its text lets expect, ``reset_prefix_cache``), the client gets an error with
the reason, and its neighbours go on.
"""

import logging
from typing import Any

from vllm.v1.request import Request, RequestStatus

logger = logging.getLogger("vllm.vllm_tts_cache")

REASON = (
    "The KV cache ran out while this request was speaking, and this model cannot go on "
    "after that. Try again. For the operator: raise gpu_memory_utilization or "
    "kv_cache_memory_bytes, or lower max_num_seqs."
)


def end_preempted(scheduler: Any) -> None:
    """Hook a new scheduler."""
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
    logger.error("Request %s was preempted, and ends: %s", request_id, REASON)
    # The host tells the client so of what is in here, when it takes in the output.
    told = scheduler._streaming_context_overflow
    told[request_id] = (request.client_index, REASON)
    scheduler.finish_requests(request_id, RequestStatus.FINISHED_ERROR)
