"""Tests: integration, simcluster, apiserver, crd."""
