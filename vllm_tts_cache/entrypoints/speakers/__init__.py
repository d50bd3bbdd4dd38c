"""Does what is asked for: look-ups, registering, encodings, deletions."""
