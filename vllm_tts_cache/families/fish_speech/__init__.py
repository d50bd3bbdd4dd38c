"""Fish Speech S2 Pro; what the generic parts need of it is in ``family``."""
