"""Gives devices the MIG layouts of their leases, directly or with the privileged partitioner."""
