"""Records of the agent: the checkpoint on disk, and known leases."""
