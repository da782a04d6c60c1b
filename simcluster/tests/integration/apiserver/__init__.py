"""Tests: integration, simcluster, apiserver."""
