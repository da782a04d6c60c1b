"""GPUs of the node: NVML or simulation, inventory, health."""
