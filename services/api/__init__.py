"""The page and `/api/v1`: devices, their leases, waiting pods, and recent events."""
