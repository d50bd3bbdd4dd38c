"""A tiny Qwen3-TTS Base checkpoint with random weights. Not a model."""
