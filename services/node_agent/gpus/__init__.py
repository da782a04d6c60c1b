"""GPUs of the node: inventory, sharing, probes, health; rooms for NVML and simulation."""
