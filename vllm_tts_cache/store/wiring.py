"""Opens the tiers that the settings describe."""

from collections.abc import Mapping

from vllm_tts_cache.config import Settings
from vllm_tts_cache.store.cache import EncodingCache
from vllm_tts_cache.store.flights import FileFlights
from vllm_tts_cache.store.keys import Segment
from vllm_tts_cache.store.tiers.base import Budget
from vllm_tts_cache.store.tiers.disk import DiskTier
from vllm_tts_cache.store.tiers.memory import MemoryTier


def open_disk(settings: Settings) -> DiskTier:
    """The encodings under ``SPEAKER_SAMPLES_DIR``, shared by all its processes."""
    directory = settings.samples_dir / "encodings"
    return DiskTier(directory, _budgets(settings, settings.disk_max_bytes, None))


def open_cache(settings: Settings) -> EncodingCache:
    """A worker's cache: its memory, then the disk."""
    budgets = _budgets(settings, settings.memory_max_bytes, settings.memory_max_entries)
    return EncodingCache(
        [MemoryTier(budgets), open_disk(settings)],
        FileFlights(settings.samples_dir / "locks"),
        turn_timeout_seconds=settings.encode_timeout_seconds,
    )


def _budgets(
    settings: Settings, max_bytes: int, max_entries: int | None
) -> Mapping[Segment, Budget]:
    """Split one budget, so that the segments together never exceed it."""
    inline_bytes = int(max_bytes * settings.inline_share)
    inline_entries = int((max_entries or 0) * settings.inline_share)
    rest = None if max_entries is None else max_entries - inline_entries
    inline = None if max_entries is None else inline_entries
    return {
        Segment.REGISTERED: Budget(
            max_bytes=max_bytes - inline_bytes, max_entries=rest
        ),
        Segment.INLINE: Budget(max_bytes=inline_bytes, max_entries=inline),
    }
