"""Puts the API process's speaker side together; the one place that does."""

import threading

from vllm_tts_cache.config import Settings
from vllm_tts_cache.entrypoints.ensure import Ensurer
from vllm_tts_cache.entrypoints.service import SpeakerService, logger
from vllm_tts_cache.entrypoints.storage import Storage, open_storage
from vllm_tts_cache.entrypoints.workers import EngineClient, Workers
from vllm_tts_cache.errors import TTSCacheError
from vllm_tts_cache.families.base import CloneMode
from vllm_tts_cache.families.qwen3_tts import FAMILY


def open_service(
    settings: Settings, engine_client: EngineClient | None
) -> SpeakerService:
    """Open the storage and put the service on top of it.

    Raises: StorageError.
    """
    storage = open_storage(settings)
    workers = Workers(engine_client)  # type: ignore[arg-type]
    # Going through all files takes as long as there are speakers: not the start's.
    threading.Thread(
        target=_recover, args=(storage,), name="tts-cache-recover", daemon=True
    ).start()
    return SpeakerService(
        storage=storage,
        ensurer=Ensurer(workers, storage.disk, settings.encode_timeout_seconds),
        workers=workers,
        encoders_of=_encoders_of,
    )


def _encoders_of(in_context: bool) -> tuple[str, ...]:
    return FAMILY.encoders[CloneMode.of(in_context=in_context)]


def _recover(storage: Storage) -> None:
    try:
        for sha in storage.recover():
            logger.info("Removed audio %s, which no speaker has.", sha)
    except TTSCacheError as exc:
        logger.warning("Recovering the speaker storage: %s", exc)
