"""Opens the reference audio that the settings describe."""

from vllm_tts_cache.config import Settings
from vllm_tts_cache.store.audio_store import AudioStore


def open_audio(settings: Settings) -> AudioStore:
    """The audio under ``SPEAKER_SAMPLES_DIR``, shared by all its processes."""
    return AudioStore(settings.samples_dir / "audio", settings.inline_audio_max_bytes)
