"""The 12 Hz codec's encoder, of which Qwen3-TTS and Breeze-TTS-2 have the weights."""
