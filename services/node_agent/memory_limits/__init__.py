"""Limits of memory that the NVIDIA driver itself enforces, by cgroup: R615."""
