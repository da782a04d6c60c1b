"""Isolation: HAMi-core library, region files, limits, host paths."""
