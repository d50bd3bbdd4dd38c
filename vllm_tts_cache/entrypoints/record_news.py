"""What an API server hears of rows that changed, and whom a change waits for."""

import asyncio
import logging
import time
from collections.abc import Callable

from vllm_tts_cache.entrypoints.executors import BoundedExecutor, Lookups
from vllm_tts_cache.entrypoints.record_memory import RecordMemory, boot_seconds
from vllm_tts_cache.store.participation import News
from vllm_tts_cache.store.speaker_store import SpeakerStore
from vllm_tts_cache.throttled_log import ThrottledLog

throttled = ThrottledLog(logging.getLogger("vllm.vllm_tts_cache"))

# Clocks of machines do not run equally fast.
MARGIN_SECONDS = 1.0
PATIENCE_SECONDS = 15.0
POLL_SECONDS = 0.05


class RecordNews:
    """Keeps what is remembered of rows true; for the event loop only.

    Args:
        records: What is remembered.
    """

    def __init__(self, store: SpeakerStore, lookups: Lookups, records: RecordMemory):
        self._store = store
        self._lookups = lookups
        self._records = records

    async def hear(self, threads: BoundedExecutor) -> News:
        """Delete the rows that changed, and know for how long the others are good.

        Returns what there was, of deletions too.

        Args:
            threads: Writes down that we have heard, where there was anything.

        Raises: StorageError.
        """
        asked_at = boot_seconds()
        news = await self._lookups.run(self._store.news)
        if news.speaker_ids is None:
            self._records.delete_all()
        for speaker_id in news.speaker_ids or ():
            self._records.delete(speaker_id)
        if news.speaker_ids is None or news.speaker_ids:
            await threads.run(self._store.hear, news.change)
        self._records.trust(asked_at + news.seconds - MARGIN_SECONDS)
        return news

    async def told(self, change: int, hurry: Callable[[], None]) -> None:
        """Return when all that are waited for have heard of a change.

        After a while it returns all the same, and says so in the log: the change is
        made, and who does not hear of it is dead soon, or speaks nothing.

        Args:
            change: As `Registered` has it.
            hurry: Makes this server hear soon.

        Raises: StorageError.
        """
        if not change:
            return
        hurry()
        until = time.monotonic() + PATIENCE_SECONDS
        while num_unheard := await self._lookups.run(self._store.num_unheard, change):
            if time.monotonic() > until:
                throttled.warn_of(
                    "a change",
                    "A voice was changed, and %d API servers have not said that they "
                    "know. Those that were killed are not waited for soon.",
                    num_unheard,
                )
                return
            await asyncio.sleep(POLL_SECONDS)
