"""The store: speakers, reference audio and encodings, as rows and as bytes."""
