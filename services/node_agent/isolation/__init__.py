"""Isolation: HAMi-core library, region files, host paths."""
