"""`leasehold audit`: recomputes every invariant from leases, pods and agents."""
