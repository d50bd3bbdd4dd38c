"""The serving class with what features add; cutting one takes its class away here."""

from vllm_tts_cache.entrypoints.features import (
    names,
    similarity,
    usage,
    voice_settings,
)


class ServingSpeech(
    names.Speech, voice_settings.Speech, usage.Speech, similarity.Speech
):
    """Speech by a default voice, with settings, counted and compared."""
