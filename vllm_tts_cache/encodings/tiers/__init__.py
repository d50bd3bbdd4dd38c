"""Places where encodings live."""
