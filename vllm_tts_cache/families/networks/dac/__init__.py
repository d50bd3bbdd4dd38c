"""The DAC of Fish Speech and Audio8 TTS: file, encoder, and codes in a prefill."""
