"""How a pod fits a node and its devices, and an index of nodes; pure."""
