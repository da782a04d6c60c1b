"""Tests: unit, simcluster, apiserver, kinds."""
