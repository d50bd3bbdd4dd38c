"""Registered voices and cached reference encodings for vLLM-Omni text-to-speech."""

__version__ = "0.1.0"
