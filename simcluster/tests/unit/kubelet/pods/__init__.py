"""Tests: unit, simcluster, kubelet, pods."""
