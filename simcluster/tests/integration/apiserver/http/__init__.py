"""Tests: integration, simcluster, apiserver, http."""
