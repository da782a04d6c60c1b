"""GPUs of the node: inventory, sharing, probes, health."""
