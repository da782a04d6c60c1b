"""The driver of simulated GPUs in C: libcuda, libnvidia-ml, programs that use them, and a build."""
