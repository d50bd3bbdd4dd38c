"""Puts the API process's speaker side together; the one place that does."""

import threading
from collections.abc import Callable

from vllm_tts_cache.config import Settings
from vllm_tts_cache.entrypoints.encoding_source import EncodingSource
from vllm_tts_cache.entrypoints.ensure import Ensurer
from vllm_tts_cache.entrypoints.prompt_memory import PromptMemory
from vllm_tts_cache.entrypoints.service import SpeakerService, logger
from vllm_tts_cache.entrypoints.storage import Storage, open_storage
from vllm_tts_cache.entrypoints.workers import EngineClient, Workers
from vllm_tts_cache.errors import TTSCacheError
from vllm_tts_cache.speaker.family import Family
from vllm_tts_cache.store.cache import EncodingCache
from vllm_tts_cache.store.flights import FileFlights

# Of what prompts begin with, per process: about 5,000 voices of 30 s on Fish Speech.
PROMPT_MEMORY_MAX_BYTES = 16 * 1024 * 1024


def open_service(
    settings: Settings,
    engine_client: EngineClient | None,
    family: Callable[[], Family | None],
) -> SpeakerService:
    """Open the storage and put the service on top of it.

    ``family`` tells which model is served, once the host knows it.

    Raises: StorageError.
    """
    storage = open_storage(settings)
    workers = Workers(engine_client)  # type: ignore[arg-type]
    # Going through all files takes as long as there are speakers: not the start's.
    threading.Thread(
        target=_recover, args=(storage,), name="tts-cache-recover", daemon=True
    ).start()
    ensurer = Ensurer(workers, storage.disk, settings.encode_timeout_seconds)
    return SpeakerService(
        storage=storage,
        ensurer=ensurer,
        workers=workers,
        encodings=EncodingSource(_reader(settings, storage), ensurer, workers),
        prompts=PromptMemory(PROMPT_MEMORY_MAX_BYTES),
        family=family,
    )


def _reader(settings: Settings, storage: Storage) -> EncodingCache:
    flights = FileFlights(settings.samples_dir / "locks")
    return EncodingCache([storage.disk], flights)


def _recover(storage: Storage) -> None:
    try:
        for sha in storage.recover():
            logger.info("Removed audio %s, which no speaker has.", sha)
    except TTSCacheError as exc:
        logger.warning("Recovering the speaker storage: %s", exc)
