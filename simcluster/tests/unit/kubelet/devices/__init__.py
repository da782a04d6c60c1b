"""Tests: unit, simcluster, kubelet, devices."""
