"""What Fish Speech and Audio8 TTS share: their codec's file, and how codes are read."""
