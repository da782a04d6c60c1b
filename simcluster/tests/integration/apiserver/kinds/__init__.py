"""Tests: integration, simcluster, apiserver, kinds."""
