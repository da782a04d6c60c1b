"""Tests: unit, simcluster, apiserver."""
