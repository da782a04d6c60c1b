"""Allocate: which container the kubelet allocates for, and what it gets."""
