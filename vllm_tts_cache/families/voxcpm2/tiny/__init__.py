"""A tiny VoxCPM2 checkpoint with random weights. Not a model."""
