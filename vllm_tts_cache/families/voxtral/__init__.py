"""Voxtral TTS, whose released checkpoint clones nothing; see ``family``."""
