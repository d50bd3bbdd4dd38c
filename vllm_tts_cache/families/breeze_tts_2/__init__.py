"""Breeze-TTS-2: a transcript and Qwen3's codec's codes before the text."""
