"""The serving class with what features add; cutting one takes its class away here."""

from vllm_tts_cache.entrypoints.features import (
    names,
    similarity,
    usage,
    voice_settings,
    webhook,
)


class ServingSpeech(
    names.Speech, voice_settings.Speech, usage.Speech, similarity.Speech, webhook.Speech
):
    """Speech by a default voice, with settings, counted, compared and told of."""
