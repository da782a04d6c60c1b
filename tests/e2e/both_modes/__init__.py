"""Tests on a node with a GPU in MIG mode and one that is shared."""
