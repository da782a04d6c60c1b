"""Tests: integration, simcluster, kubelet."""
