"""Allocate: which pods may be bound, which container the kubelet allocates for, what it gets."""
