"""The page: which devices there are, who holds what of them, who waits and why, as it happens."""
