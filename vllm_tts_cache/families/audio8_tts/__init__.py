"""Audio8 TTS; ``family`` has what the generic code needs to know."""
