"""A tiny Qwen3-TTS Base checkpoint in the released layout, with random weights."""
