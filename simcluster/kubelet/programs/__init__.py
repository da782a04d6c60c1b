"""Programs of containers that use the simulated GPUs, as processes of this machine."""
