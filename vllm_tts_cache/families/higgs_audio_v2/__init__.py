"""Higgs Audio v2; what the generic parts need of it is in ``family``."""
