"""The dashboard: a page and an API of devices, their leases, waiting pods, and recent events."""
