"""GPUs and the nodes that have them."""
