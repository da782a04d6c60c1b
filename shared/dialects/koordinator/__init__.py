"""Koordinator: `koordinator.sh/gpu*` resources and annotations, and `Device` objects."""
