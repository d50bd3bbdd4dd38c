"""Voices for a batch job without a server: ``OfflineSpeakers(Omni(...))``.

The worker encodes in the background, on the same storage as a server; what a server
has encoded is not encoded again, nor the other way round.
"""

from vllm_tts_cache.offline.speakers import (
    OfflineEngine,
    OfflineSpeakers,
    PreparedSpeaker,
)

__all__ = ["OfflineEngine", "OfflineSpeakers", "PreparedSpeaker"]
