"""`leasehold audit`: recomputing totals from leases, pods and agents."""
