"""The objects that the API server serves for us."""
