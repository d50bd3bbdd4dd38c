"""A tiny Fish Speech S2 Pro checkpoint in the released layout, with random weights."""
