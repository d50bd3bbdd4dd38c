"""Registered voices and cached reference encodings for vLLM-Omni text-to-speech."""

__version__ = "0.1.0"

# The version of vLLM and vLLM-Omni that it is for.
SUPPORTED_HOST = "0.30"
