"""A tiny Fish Speech S2 Pro checkpoint with random weights. Not a model."""

from vllm_tts_cache.testing.tiny_checkpoint import TinyWriter

TINY = TinyWriter(write=f"{__name__}.write:write")
