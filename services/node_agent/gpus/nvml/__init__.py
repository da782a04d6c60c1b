"""Everything that calls NVML: GPUs, MIG instances, links, processes, XID events."""
