"""A service's copy of nodes and devices, and what is used of them."""
