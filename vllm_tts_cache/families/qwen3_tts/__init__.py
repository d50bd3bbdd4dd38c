"""Qwen3-TTS Base; ``family`` has what the generic code needs to know."""
