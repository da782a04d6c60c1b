"""The rules by which a pod fits a node and its devices, for placers, binders and tests; pure."""
