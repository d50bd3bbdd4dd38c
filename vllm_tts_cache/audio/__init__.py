"""Decodes reference audio to checked mono float32 with a content address."""
