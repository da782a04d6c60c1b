"""`leasehold what-if` and `leasehold defrag`: placements tried on a copy of the ledger's nodes."""
