"""ResourceClaims: leases of what schedulers have allocated, and the answers in their status."""
