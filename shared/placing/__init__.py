"""The rules by which a pod fits a node and its devices: pure, for whoever has to know them."""
