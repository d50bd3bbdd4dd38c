"""A tiny OmniVoice checkpoint with random weights. Not a model."""
