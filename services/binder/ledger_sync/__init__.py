"""Keeping the ledger in sync with the cluster: leases, inventory, rebuild, expiry, gates."""
