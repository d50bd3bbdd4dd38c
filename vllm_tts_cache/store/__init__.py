"""Encodings: what reference encoders make of reference audio, and where it is kept."""
