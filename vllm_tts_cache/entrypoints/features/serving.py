"""The serving class with what features add; cutting one takes its class away here."""

from vllm_tts_cache.entrypoints.features import names, usage, voice_settings


class ServingSpeech(names.Speech, voice_settings.Speech, usage.Speech):
    """Speech by a default voice, with the settings of each, counted."""
