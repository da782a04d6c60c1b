"""Leases of ResourceClaims: allocations of schedulers are leased, and answered in their status."""
