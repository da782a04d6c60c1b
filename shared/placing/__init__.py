"""How a pod fits nodes and devices; pure."""
