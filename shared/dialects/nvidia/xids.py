"""Errors that NVIDIA's driver reports; pure."""

XID_CATALOGUE = "https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html"
"""What each Xid means, and what to do."""
