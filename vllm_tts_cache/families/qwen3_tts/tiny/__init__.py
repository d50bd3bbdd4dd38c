"""A tiny Qwen3-TTS Base checkpoint with random weights. Not a model."""

from vllm_tts_cache.families.qwen3_tts.tiny.sizes import CheckpointOptions
from vllm_tts_cache.testing.tiny_checkpoint import TinyWriter

TINY = TinyWriter(options=CheckpointOptions(), write=f"{__name__}.write:write")
