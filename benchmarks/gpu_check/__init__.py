"""What of the reference encoders only a GPU can show; see ``__main__``."""
