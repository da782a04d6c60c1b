"""`leasehold doctor`: checks of nodes and of the cluster's components."""
