"""The KV blocks of talkers: their reservation, replay, and eviction with their voice.

Preemption must not harm a talker: its blocks are reserved, or it replays.

vLLM preempts a running request when the KV cache has no block for its next token, and
later computes its tokens again. The host's state of a position beyond its token is lost
then. So a request of a family that cannot resume is admitted only if the free blocks
hold all that it can take, and all that the running requests can still take.

A request can take its prompt and ``max_tokens``. Few take a tenth of that, so a family
may say what a text plausibly takes. A request that takes longer counts with its worst
case from then on, and new ones wait. If the blocks run out nevertheless, the newest
request ends as an error that tells its client the reason, and the others go on.

A request that must wait keeps its place in the queue, as when vLLM itself has no blocks
for it. With no request running vLLM decides alone, so no request waits for ever: vLLM
checks at start that the cache holds ``max_model_len`` tokens beside the null block
(``get_kv_cache_configs`` in ``v1/core/kv_cache_utils.py``).

With guidance two requests speak one text. The host's scheduler for that reserves all
that both can take, so it is left alone: refusing one of the two would end the engine.

A talker that resumes builds the rows of what it spoke again. The scheduler's part:

* The last token has no frame yet: its residual codes are made when it is decoded. So
  it is computed alone, as a decode step, after all that was spoken.
* The prefix cache finds KV after a prompt by token ids, and frames with the same first
  code have the same. So only a prompt's KV is taken from it.
* Stage 1 has the frames that are computed again. The host skips those before the last
  one that it sent; the last, sent again, would make it send its chunk again.

As in vLLM itself, KV that is computed again may differ in its last bits where a kernel
rounds many positions in another way than one.

A deleted voice's KV is evicted. vLLM finds a block by a hash of its ids and of the
voice's salt, and does not know its voice. So the engine's thread notes the voice when a
request frees its blocks, at a cost that does not depend on the number of voices. The
bytes of an evicted block stay in the device's memory until another request gets the
block; no request can read them.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import lru_cache, wraps
from typing import Any

import msgspec
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request, RequestStatus
from vllm_omni.core.sched.omni_ar_scheduler import OmniARScheduler
from vllm_omni.core.sched.omni_cfg_ar_scheduler import OmniCFGARScheduler

from vllm_tts_cache import patch_once
from vllm_tts_cache.logs import ThrottledLog, logger
from vllm_tts_cache.speaker.family import family_of_model
from vllm_tts_cache.speaker.reference import FIELD
from vllm_tts_cache.speaker.rpc_client import DELETE
from vllm_tts_cache.speaker.wire import DeleteCall

throttled = ThrottledLog()

_ADMISSIBLE = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
_MAX_TEXTS = 1024

REASON = (
    "The KV cache ran out while this request was speaking, and this model cannot go on "
    "after that. Try again. For the operator: raise gpu_memory_utilization or "
    "kv_cache_memory_bytes, or lower max_num_seqs."
)


# The host's method, called by the function that replaces it.
_host_init = OmniARScheduler.__init__


def install() -> None:
    """Let every scheduler made from now on preempt without harm."""
    patch_once(OmniARScheduler, "__init__", lambda _: init_scheduler)


@wraps(_host_init)
def init_scheduler(self: Any, *args: Any, **kwargs: Any) -> None:
    """Make the host's scheduler, and hook it as the model's family needs."""
    _host_init(self, *args, **kwargs)
    architectures = self.vllm_config.model_config.architectures
    if (family := family_of_model(*architectures)) is None:
        return
    if family.resumes:
        resume_by_replay(self)
    else:
        end_preempted(self)
        if not isinstance(self, OmniCFGARScheduler):
            reserve_blocks(self, family.plausible_tokens)


def reserve_blocks(
    scheduler: Any, plausible_tokens: Callable[[str], int] | None = None
) -> None:
    """Reserve blocks in a new scheduler, if its KV cache may run short."""
    allocator = ReservingAllocator(scheduler, plausible_tokens)
    num_fitting = allocator.num_longest_requests()
    # vLLM 0.32 can run fewer requests at a time than it has places for.
    most = getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs)
    if num_fitting >= most:
        return
    scheduler.kv_cache_manager.allocate_slots = allocator
    logger.warning(
        "The KV cache holds %d of the max_num_seqs=%d requests of max_model_len=%d "
        "tokens. A request of this model waits until the cache can hold its prompt "
        "and %s to the end. For more requests at a time raise gpu_memory_utilization "
        "or kv_cache_memory_bytes, or lower max_model_len or the requests' max_tokens.",
        num_fitting,
        most,
        scheduler.max_model_len,
        "max_tokens" if plausible_tokens is None else "what its text plausibly takes",
    )


class ReservingAllocator:
    """``KVCacheManager.allocate_slots`` that also refuses an unsafe start."""

    def __init__(
        self, scheduler: Any, plausible_tokens: Callable[[str], int] | None = None
    ):
        self._scheduler = scheduler
        self._plausible_tokens = None
        if plausible_tokens is not None:  # called for each running request in each step
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
        """Return new blocks, or None if a request may not start yet."""
        if request.status in _ADMISSIBLE and not self._may_start(
            request,
            kwargs.get("new_computed_blocks"),
            kwargs.get("num_new_computed_tokens", 0),
        ):
            return None
        return self._allocate_slots(request, *args, **kwargs)

    def num_longest_requests(self) -> int:
        """Return how many requests of ``max_model_len`` the free blocks hold."""
        # No request has this id, so no block is allocated to it yet.
        num_blocks = self._num_blocks_to_allocate("", self._scheduler.max_model_len)
        return self._manager.block_pool.get_num_free_blocks() // num_blocks

    def num_tokens_reserved(self, request: Request) -> int:
        """Return how many positions of the KV cache are reserved for a request."""
        max_model_len = self._scheduler.max_model_len
        # A session's next input brings its own prompt and max_tokens.
        if request.resumable:
            return max_model_len
        unspoken = request.num_prompt_tokens + self._max_overrun_tokens
        worst = min(unspoken + request.max_tokens, max_model_len)
        if self._plausible_tokens is None or not (text := _text_of(request)):
            return worst
        plausible = unspoken + self._plausible_tokens(text)
        return worst if request.num_tokens > plausible else min(plausible, worst)

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
        """Return how many free blocks so many tokens need, beyond the request's own."""
        blocks = hit_blocks or self._manager.empty_kv_cache_blocks
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
    """Return the text of a request, where the host's adapters put it."""
    text = information_of(request, "text")
    if isinstance(text, list):
        text = next(iter(text), None)
    return text if isinstance(text, str) else None


def resume_by_replay(scheduler: Any) -> None:
    """Hook a new scheduler of a family that resumes."""
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
        """Return how many of these tokens to compute in this step."""
        num_new_tokens = self._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        last = request.num_tokens - 1
        if not request.num_output_tokens or num_computed_tokens >= last:
            return num_new_tokens
        end = min(num_computed_tokens + num_new_tokens, last)
        # A spoken token that is computed alone would be spoken again.
        if end == last - 1:
            end -= 1
        if end == num_computed_tokens + 1 and end > request.num_prompt_tokens:
            end -= 1
        return max(end - num_computed_tokens, 0)

    def computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int, int]:
        """Return the prompt's blocks in the prefix cache, without its last token."""
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
        """Preempt, and send stage 1 no frames until the request speaks again."""
        self._preempt_request(request, *args, **kwargs)
        adapter = getattr(self._scheduler, "chunk_transfer_adapter", None)
        if adapter is not None and request.num_output_tokens:
            sent = adapter.requests_num_chunks_sent
            name = request.external_req_id
            sent[name] = max(sent.get(name, 0), request.num_tokens)


def end_preempted(scheduler: Any) -> None:
    """Hook a new scheduler of a family that does not resume."""
    preempt, update = scheduler._preempt_request, scheduler.update_from_output
    preempted: dict[str, Request] = {}

    def preempt_request(request: Request, *args: Any, **kwargs: Any) -> None:
        preempt(request, *args, **kwargs)
        preempted[request.request_id] = request

    def update_from_output(*args: Any, **kwargs: Any) -> Any:
        # Not in `preempt_request`, where the scheduler iterates over its queues.
        for request_id, request in preempted.items():
            if request.is_finished():
                continue
            # Throttled: a cache that is too small preempts many.
            message = "Request %s was preempted, and ends: %s"
            throttled.warn_of("a preempted request", message, request_id, REASON)
            # The host sends the client this reason with the next output.
            overflow = request.client_index, REASON
            scheduler._streaming_context_overflow[request_id] = overflow
            scheduler.finish_requests(request_id, RequestStatus.FINISHED_ERROR)
        preempted.clear()
        return update(*args, **kwargs)

    scheduler._preempt_request = preempt_request
    scheduler.update_from_output = update_from_output


class VoiceBlocks:
    """Which voice's request was the last to free each block of one KV cache.

    Another request may use the block by now. Evicting it then costs at most that its
    prefix is computed again.
    """

    def __init__(self, manager: Any):
        self._manager = manager
        self._audio_of: dict[int, str] = {}
        self._blocks: defaultdict[str, set[int]] = defaultdict(set)
        self._gone: set[str] = set()

    def note(self, request: Any) -> None:
        """Note the blocks that a request frees; evict them if its voice was deleted."""
        if (sha := audio_of(request)) is None or not self._manager.enable_caching:
            return
        blocks = blocks_of(self._manager, request.request_id)
        if request.request_id in self._gone:
            self._manager.evict_blocks(blocks)
            if request.is_finished():
                self._gone.discard(request.request_id)
            return
        if not blocks:  # it ended before it had any
            return
        for block in blocks:
            if (before := self._audio_of.get(block)) is not None:
                self._blocks[before].discard(block)
                if not self._blocks[before]:
                    del self._blocks[before]
            self._audio_of[block] = sha
        self._blocks[sha] |= blocks

    def delete(self, call: DeleteCall, requests: Iterable[Any]) -> None:
        """Evict the blocks of the audios of a call.

        Args:
            call: Names the audios.
            requests: All that have not ended; if one speaks with such an audio, blocks
                that it computes later are evicted when they are freed.
        """
        if not self._manager.enable_caching:
            return
        audios = set(self._blocks) if call.everything else set(call.audio_sha256s)
        blocks = set[int]().union(*(self._blocks.pop(sha, ()) for sha in audios))
        for block in blocks:
            del self._audio_of[block]
        for request in requests:
            sha = audio_of(request)
            if sha in audios or (call.everything and sha is not None):
                self._gone.add(request.request_id)
                blocks |= blocks_of(self._manager, request.request_id)
        self._manager.evict_blocks(blocks)


def audio_of(request: Any) -> str | None:
    """Return the address of the audio that a request speaks with, if it has one."""
    named = information_of(request, FIELD)
    return named[0] if named else None


def information_of(request: Any, field: str) -> Any:
    """Return a field of a request's additional information, serialized or not."""
    info = getattr(request, "additional_information", None)
    entry = (getattr(info, "entries", None) or info or {}).get(field)
    return getattr(entry, "list_data", None) or getattr(entry, "scalar_data", entry)


def blocks_of(kv_cache_manager: Any, request_id: str) -> set[int]:
    """Return the blocks of a request, of all groups of the KV cache."""
    groups = kv_cache_manager.get_block_ids(request_id)
    return {block for group in groups for block in group}


# The host's, called by the functions that replace them.
_free_request_blocks = OmniARScheduler._free_request_blocks
_collective_rpc = EngineCore.collective_rpc


def install_eviction() -> None:
    """Hook the scheduler, and the engine core's RPC to workers."""
    patch_once(OmniARScheduler, "_free_request_blocks", lambda _: free_request_blocks)
    patch_once(EngineCore, "collective_rpc", lambda _: collective_rpc)


@wraps(_free_request_blocks)
def free_request_blocks(self: Any, request: Any) -> None:
    """Note the voice of the request's blocks, then free them as the host does."""
    _voice_blocks(self).note(request)
    _free_request_blocks(self, request)


@wraps(_collective_rpc)
def collective_rpc(
    self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
) -> Any:
    """Call the workers as the host does; after a DELETE, evict the audio's blocks."""
    # After the workers: until they delete, they could give a request its prompt.
    answer = _collective_rpc(self, method, timeout, args, kwargs)
    if method == DELETE.name and isinstance(self.scheduler, OmniARScheduler):
        call = msgspec.msgpack.decode(*args, type=DeleteCall)
        _voice_blocks(self.scheduler).delete(call, self.scheduler.requests.values())
    return answer


def _voice_blocks(scheduler: Any) -> VoiceBlocks:
    if not hasattr(scheduler, "tts_cache_voice_blocks"):
        scheduler.tts_cache_voice_blocks = VoiceBlocks(scheduler.kv_cache_manager)
    return scheduler.tts_cache_voice_blocks
