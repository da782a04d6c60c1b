"""A service's copy of nodes and devices."""
