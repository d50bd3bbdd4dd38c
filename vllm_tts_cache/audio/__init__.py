"""Reference audio: bytes in, checked mono float32 out, kept by content address."""
