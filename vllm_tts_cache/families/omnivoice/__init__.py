"""OmniVoice; what the generic parts need of it is in ``family``."""
