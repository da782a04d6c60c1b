"""Limits of running containers, which follow the sizes of their leases."""
