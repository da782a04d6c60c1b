"""Resizing the lease of a running pod."""
