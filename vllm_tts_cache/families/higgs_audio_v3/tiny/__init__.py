"""A tiny Higgs Audio v3 checkpoint with random weights. Not a model."""
