"""What a reference clip is worth: what is measured of it, and what that means."""
