"""The cluster in memory, and as one viewer may see it."""
