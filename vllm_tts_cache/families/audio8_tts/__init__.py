"""Audio8 TTS; what the generic parts need of it is in ``family``."""
