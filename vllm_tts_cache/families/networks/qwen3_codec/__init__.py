"""The 12 Hz codec's encoder, which Qwen3-TTS and Breeze-TTS-2 bring in a folder."""
