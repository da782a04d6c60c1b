"""Tests: unit, simcluster, kubelet."""
