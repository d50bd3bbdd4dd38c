"""A tiny CosyVoice3 checkpoint with random weights. Not a model."""
