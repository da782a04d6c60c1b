"""Allocate: which pod the kubelet asks for, and what its container gets."""
