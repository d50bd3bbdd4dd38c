"""Voices for a batch job without a server: ``OfflineSpeakers(Omni(...))``.

The worker encodes in the background, on the same storage as a server: a job does not
encode again what a server has encoded, nor a server what a job has.
"""

from vllm_tts_cache.offline.speakers import OfflineSpeakers, PreparedSpeaker

__all__ = ["OfflineSpeakers", "PreparedSpeaker"]
