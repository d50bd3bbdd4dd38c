"""CosyVoice3; what the generic parts need of it is in ``family``."""
