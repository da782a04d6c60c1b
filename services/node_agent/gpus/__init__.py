"""GPUs of the node: inventory, sharing, probes, health; packages for NVML and simulation."""
