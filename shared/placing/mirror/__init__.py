"""A service's copy of nodes and devices, with what is used of them."""
