"""Leases, the records of the ledger around them, and preemptions, which end them early."""
