"""Requests whose speaker prompt cannot be had, until the scheduler has ended them.

``preprocess`` must not raise: that would end the engine. So a talker puts such a
request on this list, prefills it with something harmless, and forces the id that
``scheduler`` turns into an error of that request.
"""

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vllm_tts_cache.errors import log_text_of
from vllm_tts_cache.model_executor.speakers import WorkerSpeakers
from vllm_tts_cache.throttled_log import ThrottledLog

# A request leaves this list long before so many others have failed after it.
MAX_FAILED_REQUESTS = 4096


class FailedRequests:
    """Remembers failed requests, bounded, and ends them where logits are computed.

    Args:
        failure_id: The id to force; the scheduler hook knows it too.
    """

    def __init__(self, failure_id: int) -> None:
        self._failure_id = failure_id
        self._ids: OrderedDict[str, None] = OrderedDict()
        self._log = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def add(
        self, request_id: str, cause: Exception, speakers: WorkerSpeakers | None
    ) -> None:
        """Log the cause, count it, and remember the request."""
        message = "No speaker prompt for request %s: %s"
        self._log.warn_of("no speaker prompt", message, request_id, log_text_of(cause))
        if speakers is not None:
            speakers.remember_failed_prompt(request_id, str(cause) or repr(cause))
        self._ids[request_id] = None
        while len(self._ids) > MAX_FAILED_REQUESTS:
            self._ids.popitem(last=False)

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
        self._prefixes: OrderedDict[str, None] = OrderedDict()
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
        while len(self._prefixes) > MAX_FAILED_REQUESTS:
            self._prefixes.popitem(last=False)
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
