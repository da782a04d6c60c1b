"""`leasehold doctor`: checks of a node and of the cluster."""
