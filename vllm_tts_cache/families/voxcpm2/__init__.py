"""VoxCPM2; ``family`` has what the generic code needs to know."""
