"""Ends a request whose prompt cannot be built, and no other.

An exception in ``preprocess`` would end the engine. So a talker adds the request to
`FailedRequests`, prefills it with harmless rows, and makes it sample an id that the
model never samples. When the scheduler processes sampled ids, the hook below finishes
the request as an error with our reason: a 500 with text.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from cachetools import LRUCache
from vllm.v1.request import RequestStatus
from vllm_omni.core.sched.omni_ar_scheduler import OmniARScheduler

from vllm_tts_cache import patch_once
from vllm_tts_cache.errors import log_text_of
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.model_executor import kv_room
from vllm_tts_cache.speaker.family import family_of_model

if TYPE_CHECKING:
    from vllm_tts_cache.model_executor.speakers import WorkerEncodings

# So many ids are kept: a request ends long before so many others fail after it.
MAX_FAILED_REQUESTS = 4096

# Shown to people; the API process asks the workers for the cause, by request id.
REASON = (
    "The speaker prompt of this voice was not there when its request began. The "
    "request failed alone; the server log has the cause. Try again; if it goes on, "
    "register the voice again."
)
REASON_WITHOUT_SPEAKER = (
    "The model cannot speak what this request says. The request failed alone; the "
    "server log has the cause. Send text to POST /v1/audio/speech."
)


class FailedRequests:
    """The ids of failed requests, and the token id that ends them."""

    def __init__(self, failure_id: int) -> None:
        self._failure_id = failure_id
        self._ids = LRUCache[str, None](MAX_FAILED_REQUESTS)
        self._log = ThrottledLog()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def add(
        self, request_id: str, cause: Exception, speakers: "WorkerEncodings | None"
    ) -> None:
        """Log the cause, count it, and remember the request."""
        message = "No prompt for request %s: %s"
        self._log.warn_of("no prompt", message, request_id, log_text_of(cause))
        if speakers is not None:
            speakers.remember_failed_prompt(request_id, str(cause) or repr(cause))
        self._ids[request_id] = None

    def end(self, logits: torch.Tensor, request_ids: Sequence[str]) -> torch.Tensor:
        """Leave failed requests only the failure id to sample.

        Args:
            logits: ``(num_rows, vocab_size)``, changed in place; left alone if the host
                asks for other rows (a prompt's, say), whose number differs.
            request_ids: The request of each row.
        """
        if rows := self._rows(request_ids, len(logits)):
            logits[rows] = float("-inf")
            logits[rows, self._failure_id] = 0.0
        return logits

    def force(self, sampled: torch.Tensor, request_ids: Sequence[str]) -> None:
        """Replace the ids that a model itself has sampled for failed requests.

        Args:
            sampled: ``(num_rows, num_ids)``; changed in place.
            request_ids: As for `end`.
        """
        if rows := self._rows(request_ids, len(sampled)):
            sampled[rows] = self._failure_id

    def _rows(self, request_ids: Sequence[str], num_rows: int) -> list[int]:
        if not self._ids or len(request_ids) != num_rows:
            return []
        return [row for row, rid in enumerate(request_ids) if rid in self._ids]


def ending_sampler(sampler: Any, failed: FailedRequests) -> Any:
    """Wrap a sampler of the second runner, so that failed requests get the failure id.

    vLLM-Omni 0.32 samples Qwen3-TTS with one that masks this id after `compute_logits`.
    Nothing samples after the wrapper. What the host does next with the ids, it does
    with the failure id: it takes a frame that begins with it for none.
    """
    hosts: Any = import_module("vllm_omni.worker_v2.omni_sampler")

    class EndingSampler(hosts.OmniSampler):
        def sample_step(
            self, hidden: Any, batch: Any, states: Any, grammar: Any, standard: Any
        ) -> Any:
            sampled = hosts.sample_with_output(
                self.base_sampler, standard, hidden, batch, states, grammar
            )
            failed.force(sampled.sampler_output.sampled_token_ids, batch.req_ids)
            return sampled

    return EndingSampler(sampler)


class SuspectPrefixes:
    """KV prefixes that may hold no voice, because a request with them failed.

    The scheduler evicts a failed request's blocks when it processes its output. Another
    request of that prefix, scheduled earlier, may have found them, and would speak
    without a voice. In the step of the failure it may even come first: the second
    runner puts shorter spans before longer ones.
    """

    def __init__(self) -> None:
        self._prefixes = LRUCache[str, None](MAX_FAILED_REQUESTS)
        self._relied_on: defaultdict[str, list[str]] = defaultdict(list)

    def rely_on(self, prefix: str, request_id: str) -> bool:
        """Tell whether the request may use the prefix's KV; note it for this step."""
        if prefix in self._prefixes:
            return False
        self._relied_on[prefix].append(request_id)
        return True

    def add(self, prefix: str) -> list[str]:
        """Suspect a prefix; return the requests that relied on it in this step."""
        self._prefixes[prefix] = None
        return self._relied_on.pop(prefix, [])

    def end_step(self) -> None:
        """Forget which requests relied on a prefix: this step's prefills are built."""
        self._relied_on.clear()

    def clear(self, prefix: str) -> None:
        """Trust a prefix again: a request has computed it from its first token."""
        self._prefixes.pop(prefix, None)


def request_id_of(info: Mapping[str, Any]) -> str:
    """Return a request's id, which the host's two model runners name differently."""
    return str(info.get("request_id", info.get("req_id")))


def install() -> None:
    """Hook the scheduler class, from which the asynchronous one inherits."""
    patch_once(
        OmniARScheduler,
        "_update_request_with_output",
        lambda _: _update_request_with_output,
    )
    kv_room.install()
    kv_room.install_eviction()


def _update_request_with_output(
    self: Any, request: Any, new_token_ids: list[int], *args: Any, **kwargs: Any
) -> tuple[list[int], bool]:
    scheduler: Any = super(OmniARScheduler, self)
    inherited = scheduler._update_request_with_output
    token_ids, stopped = inherited(request, new_token_ids, *args, **kwargs)
    family = family_of_model(*self.vllm_config.model_config.architectures)
    if family is None or family.failure_id not in token_ids:
        return token_ids, stopped
    request.status = RequestStatus.FINISHED_ERROR
    has_speaker = kv_room.audio_of(request) is not None
    request.stop_reason = REASON if has_speaker else REASON_WITHOUT_SPEAKER
    request.resumable = False
    # The blocks are in the prefix cache under the voice's ids and salt and hold no
    # voice: the next request of the voice would speak with them, and not fail.
    manager = self.kv_cache_manager
    manager.evict_blocks(kv_room.blocks_of(manager, request.request_id))
    return [], True
