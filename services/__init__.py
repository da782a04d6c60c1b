"""The services, one folder each."""

import gc

GC_THRESHOLD = (20_000, 20, 50)
"""Imports and batches create many objects and hardly any cycles."""
gc.set_threshold(*GC_THRESHOLD)
