"""Takes the KV of a deleted voice out of the prefix cache.

vLLM finds a block by a hash of its ids and of the voice's salt, and does not know whose
it is. So it is noted where a request gives its blocks back, in the engine's thread, at
a cost that depends on no number of voices. What a block holds stays in the device's
memory until another request gets it; nobody finds it there any more.
"""

from collections import defaultdict
from collections.abc import Iterable
from functools import wraps
from typing import Any

from vllm_tts_cache import patch_once
from vllm_tts_cache.speaker import wire
from vllm_tts_cache.speaker.reference import FIELD
from vllm_tts_cache.speaker.rpc_client import DELETE


class VoiceBlocks:
    """The blocks of one KV cache that requests with a voice gave back.

    A block counts as the last voice's that had it: there are never more of them than
    blocks. If others have it by now they compute their prefix once more, at worst.
    """

    def __init__(self, manager: Any):
        self._manager = manager
        self._audio_of: dict[int, str] = {}
        self._blocks: defaultdict[str, set[int]] = defaultdict(set)
        self._gone: set[str] = set()

    def note(self, request: Any) -> None:
        """A request gives its blocks back; of a deleted voice none is found again."""
        if (sha := audio_of(request)) is None or not self._manager.enable_caching:
            return
        blocks = self._blocks_of(request)
        if request.request_id in self._gone:
            self._manager.evict_blocks(blocks)
            if request.is_finished():
                self._gone.discard(request.request_id)
            return
        if not blocks:  # it ended before it had any
            return
        for block in blocks:
            if (before := self._audio_of.get(block)) is not None:
                self._leave(before, block)
            self._audio_of[block] = sha
        self._blocks[sha] |= blocks

    def delete(self, call: wire.DeleteCall, requests: Iterable[Any]) -> None:
        """Nobody finds blocks of these audios from now on.

        Args:
            call: Which.
            requests: All that have not ended; of those, what they compute yet as well.
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
                blocks |= self._blocks_of(request)
        self._manager.evict_blocks(blocks)

    def _leave(self, sha: str, block: int) -> None:
        self._blocks[sha].discard(block)
        if not self._blocks[sha]:
            del self._blocks[sha]

    def _blocks_of(self, request: Any) -> set[int]:
        groups = self._manager.get_block_ids(request.request_id)
        return {block for group in groups for block in group}


def audio_of(request: Any) -> str | None:
    """Return the address of the audio that a request speaks with, None without one."""
    info = getattr(request, "additional_information", None)
    entry = (getattr(info, "entries", None) or info or {}).get(FIELD)
    named = getattr(entry, "list_data", entry)
    return named[0] if named else None


def install() -> None:
    """Hook the scheduler and the engine core's calls of workers."""
    from vllm.v1.engine.core import EngineCore
    from vllm_omni.core.sched.omni_ar_scheduler import OmniARScheduler

    def noting_blocks(free: Any) -> Any:
        @wraps(free)
        def noting(self: Any, request: Any) -> None:
            _noted_by(self).note(request)
            free(self, request)

        return noting

    def deleting_blocks(call_workers: Any) -> Any:
        @wraps(call_workers)
        def deleting(
            self: Any,
            method: Any,
            timeout: Any = None,
            args: Any = (),
            kwargs: Any = None,
        ) -> Any:
            # After the workers, of whom a request could have had its prompt.
            answer = call_workers(self, method, timeout, args, kwargs)
            if method == DELETE.name and isinstance(self.scheduler, OmniARScheduler):
                call = wire.decode(wire.DeleteCall, *args)
                _noted_by(self.scheduler).delete(call, self.scheduler.requests.values())
            return answer

        return deleting

    patch_once(OmniARScheduler, "_free_request_blocks", noting_blocks)
    patch_once(EngineCore, "collective_rpc", deleting_blocks)


def _noted_by(scheduler: Any) -> VoiceBlocks:
    name = "tts_cache_voice_blocks"
    if (noted := getattr(scheduler, name, None)) is None:
        noted = VoiceBlocks(scheduler.kv_cache_manager)
        setattr(scheduler, name, noted)
    return noted
