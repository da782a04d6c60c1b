"""Keeping the ledger in step with the cluster: leases, inventory, rebuild, expiry."""
