"""Tests: unit, simcluster, apiserver, storage."""
