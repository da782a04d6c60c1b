"""Koordinator: `koordinator.sh/gpu*` resources, annotations and Device objects."""
