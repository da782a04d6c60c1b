"""Tests: unit, simcluster, kubelet, containers."""
