"""A running Leasehold as the commands read it: its location, and its state at one moment."""
