"""What the DACs of Fish Speech and Audio8 TTS share: their file and how audio comes."""
