"""What the decoders of the model that is served keep of voices."""

from collections.abc import Callable

from vllm_tts_cache.speaker.family import Family
from vllm_tts_cache.speaker.rpc_client import (
    DECODER_STATS,
    DELETE_STATES,
    A,
    AsyncWorkers,
    Method,
    UnsupportedModelError,
)
from vllm_tts_cache.speaker.wire import DecoderStats, DeleteCall


class Decoders:
    """Asks the stage behind the talker, of families that keep something there.

    Args:
        workers: None where there are none.
        family: The one that is served; None if it is none of ours.
    """

    def __init__(
        self, workers: AsyncWorkers | None, family: Callable[[], Family | None]
    ):
        self._workers = workers
        self._family = family

    async def delete(self, call: DeleteCall) -> None:
        """Delete what is kept of these audios. Raises: WorkerRPCError."""
        await self._call(DELETE_STATES, call)

    async def stats(self) -> list[DecoderStats]:
        """Each worker's counters and sizes; none where nothing is kept.

        Raises: WorkerRPCError.
        """
        return await self._call(DECODER_STATS)

    async def _call(self, method: Method[A], call: DeleteCall | None = None) -> list[A]:
        family = self._family()
        if self._workers is None or family is None or not family.decoders:
            return []
        try:
            return await self._workers.call(method, call)
        except UnsupportedModelError:
            return []  # it is switched off
