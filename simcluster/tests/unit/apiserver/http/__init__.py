"""Tests: unit, simcluster, apiserver, http."""
