"""Requests whose prompt cannot be built, until the scheduler has ended them.

``preprocess`` must not raise: that would end the engine. So a talker puts such a
request on this list, prefills it with something harmless, and lets it sample one id
that nothing else can sample. The hook below, where the scheduler takes in sampled ids,
finishes the request as an error with our reason: a 500 with text, while its neighbours
go on.
"""

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from cachetools import LRUCache

from vllm_tts_cache import patch_once
from vllm_tts_cache.errors import log_text_of
from vllm_tts_cache.logs import ThrottledLog
from vllm_tts_cache.model_executor.speakers import WorkerEncodings
from vllm_tts_cache.speaker.family import family_of_model
from vllm_tts_cache.speaker.reference import FIELD

# A request leaves this list long before so many others have failed after it.
MAX_FAILED_REQUESTS = 4096

# For people: the API process asks the workers, by the request's id, and reads nothing
# out of this.
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
    """Remembers failed requests, bounded, and ends them where logits are computed.

    Args:
        failure_id: The id to force; the scheduler hook knows it too.
    """

    def __init__(self, failure_id: int) -> None:
        self._failure_id = failure_id
        self._ids = LRUCache[str, None](MAX_FAILED_REQUESTS)
        self._log = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def add(
        self, request_id: str, cause: Exception, speakers: WorkerEncodings | None
    ) -> None:
        """Log the cause, count it, and remember the request."""
        message = "No prompt for request %s: %s"
        self._log.warn_of("no prompt", message, request_id, log_text_of(cause))
        if speakers is not None:
            speakers.remember_failed_prompt(request_id, str(cause) or repr(cause))
        self._ids[request_id] = None

    def end(self, logits: torch.Tensor, request_ids: Sequence[str]) -> torch.Tensor:
        """Leave failed requests one id to sample; changes ``logits`` in place.

        Args:
            logits: ``(num_rows, vocab_size)``.
            request_ids: Whose the rows are. Where the host asks for the logits of
                other rows (of a prompt, say), their number differs, and none is
                changed.
        """
        if rows := self._rows(request_ids, len(logits)):
            logits[rows] = float("-inf")
            logits[rows, self._failure_id] = 0.0
        return logits

    def force(self, sampled: torch.Tensor, request_ids: Sequence[str]) -> None:
        """Put that id in the place of what was sampled, where a model samples itself.

        Args:
            sampled: ``(num_rows, num_ids)``; changed in place.
            request_ids: As of `end`.
        """
        if rows := self._rows(request_ids, len(sampled)):
            sampled[rows] = self._failure_id

    def _rows(self, request_ids: Sequence[str], num_rows: int) -> list[int]:
        if not self._ids or len(request_ids) != num_rows:
            return []
        return [row for row, rid in enumerate(request_ids) if rid in self._ids]


class SuspectPrefixes:
    """KV prefixes that may hold no voice, because a request that has them failed.

    The scheduler drops a failed request's blocks when it takes in its output. A request
    of the same prefix that was scheduled before that may have found them, and would
    speak with nobody's voice. In the very step of the failure it may come first: the
    second runner puts the shorter spans before the longer ones. A prefix is named by
    what shapes its KV, as far as the talker knows.
    """

    def __init__(self) -> None:
        self._prefixes = LRUCache[str, None](MAX_FAILED_REQUESTS)
        self._relied_on: defaultdict[str, list[str]] = defaultdict(list)

    def __contains__(self, prefix: str) -> bool:
        return prefix in self._prefixes

    def rely_on(self, prefix: str, request_id: str) -> bool:
        """Whether the request may take the prefix's KV as it finds it.

        If so it is remembered until the step ends.
        """
        if prefix in self:
            return False
        self._relied_on[prefix].append(request_id)
        return True

    def add(self, prefix: str) -> list[str]:
        """Suspect the prefix from now on; returns who relied on it in this step."""
        self._prefixes[prefix] = None
        return self._relied_on.pop(prefix, [])

    def end_step(self) -> None:
        """Take note that what the step's requests found was computed before it."""
        self._relied_on.clear()

    def clear(self, prefix: str) -> None:
        """Trust it again: a request has computed it from its first token."""
        self._prefixes.pop(prefix, None)


def request_id_of(info: Mapping[str, Any]) -> str:
    """Return the id of the request that ``preprocess`` was given this of.

    The two model runners of the host give it different names.
    """
    return str(info.get("request_id", info.get("req_id")))


def install() -> None:
    """Hook the scheduler class; the asynchronous one inherits from it."""
    from vllm_omni.core.sched.omni_ar_scheduler import OmniARScheduler

    from vllm_tts_cache.model_executor import kv_room, voice_blocks

    patch_once(
        OmniARScheduler,
        "_update_request_with_output",
        lambda _: _update_request_with_output,
    )
    kv_room.install()
    voice_blocks.install()


def _update_request_with_output(
    self: Any, request: Any, new_token_ids: list[int], *args: Any, **kwargs: Any
) -> tuple[list[int], bool]:
    from vllm.v1.request import RequestStatus
    from vllm_omni.core.sched.omni_ar_scheduler import OmniARScheduler

    scheduler: Any = super(OmniARScheduler, self)
    inherited = scheduler._update_request_with_output
    token_ids, stopped = inherited(request, new_token_ids, *args, **kwargs)
    family = family_of_model(*self.vllm_config.model_config.architectures)
    if family is None or family.failure_id not in token_ids:
        return token_ids, stopped
    request.status = RequestStatus.FINISHED_ERROR
    names_speaker = _names_speaker(request)
    request.stop_reason = REASON if names_speaker else REASON_WITHOUT_SPEAKER
    request.resumable = False
    _delete_prefix(self.kv_cache_manager, request.request_id)
    return [], True


def _delete_prefix(kv_cache_manager: Any, request_id: str) -> None:
    """Take the request's blocks out of the prefix cache.

    They were put there when they were scheduled, under the voice's ids and salt, and
    hold no voice: the next request of it would speak with them, and not fail.
    """
    groups = kv_cache_manager.get_block_ids(request_id)
    kv_cache_manager.evict_blocks({block for group in groups for block in group})


def _names_speaker(request: Any) -> bool:
    info = getattr(request, "additional_information", None)
    return FIELD in (getattr(info, "entries", None) or info or ())
