"""Tests: unit, simcluster, apiserver, crd."""
