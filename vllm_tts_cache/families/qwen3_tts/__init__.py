"""Qwen3-TTS Base; what the generic parts need of it is in ``family``."""
