"""Layouts of leases: brings devices to them, here or in the privileged partitioner."""
