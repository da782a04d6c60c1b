"""`leasehold what-if` and `leasehold defrag`."""
