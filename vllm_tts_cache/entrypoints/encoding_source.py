"""Encodings in the API process, for families whose prompts are built from them."""

import asyncio

from vllm_tts_cache.entrypoints.ensure import EncodingNeed, Ensurer
from vllm_tts_cache.entrypoints.workers import Workers, encoding_of
from vllm_tts_cache.speaker.ref import SpeakerRef
from vllm_tts_cache.store.cache import EncodingCache
from vllm_tts_cache.store.encoding import Encoding
from vllm_tts_cache.store.keys import EncodingKey, Segment


class EncodingSource:
    """The disk, and where that fails the worker itself."""

    def __init__(self, cache: EncodingCache, ensurer: Ensurer, workers: Workers):
        self._cache = cache
        self._ensurer = ensurer
        self._workers = workers

    async def key(self, ref: SpeakerRef, encoder_name: str) -> EncodingKey:
        """Return the key under which the workers' encoder keeps the encoding.

        Raises: WorkerRPCError.
        """
        need = EncodingNeed(ref=ref, encoder_names=(encoder_name,))
        (key,) = await self._ensurer.keys(need)
        return key

    async def get(
        self, key: EncodingKey, segment: Segment, encoder_name: str
    ) -> Encoding:
        """Return an encoding that ``Ensurer.ensure`` has made sure of.

        Raises:
            EncodeError: It is gone again, or the worker's copy is damaged.
            WorkerRPCError: The workers could not be asked.
        """
        found = await asyncio.to_thread(self._cache.get, key, segment)
        if found is None:
            # The disk did not take it, or does not give it: that costs time only.
            found = await self._of_a_worker(key, encoder_name)
        return found

    async def _of_a_worker(self, key: EncodingKey, encoder_name: str) -> Encoding:
        answers = await self._workers.call(
            "tts_cache_encoding", key.audio_sha256, encoder_name
        )
        return encoding_of(answers, key)
