"""What the agent stores on disk and remembers: checkpoint and known leases."""
