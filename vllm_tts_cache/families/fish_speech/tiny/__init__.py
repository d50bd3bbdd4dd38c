"""A tiny Fish Speech S2 Pro checkpoint with random weights. Not a model."""
