"""Fish Speech S2 Pro; ``family`` has what the generic code needs to know."""
