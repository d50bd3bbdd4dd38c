"""Evicts the KV of a deleted voice from the prefix cache.

vLLM finds a block by a hash of its ids and of the voice's salt, and does not know its
voice. So the engine's thread notes the voice when a request frees its blocks, at a cost
that does not depend on the number of voices. The bytes of an evicted block stay in the
device's memory until another request gets the block; no request can read them.
"""

from collections import defaultdict
from collections.abc import Iterable
from functools import wraps
from typing import Any

import msgspec
from vllm.v1.engine.core import EngineCore
from vllm_omni.core.sched.omni_ar_scheduler import OmniARScheduler

from vllm_tts_cache import patch_once
from vllm_tts_cache.speaker.reference import FIELD
from vllm_tts_cache.speaker.rpc_client import DELETE
from vllm_tts_cache.speaker.wire import DeleteCall


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


def install() -> None:
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
