"""What the node's container runtime lets pods open: the bundles of containers, and its settings."""
