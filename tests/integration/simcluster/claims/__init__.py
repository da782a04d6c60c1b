"""Tests: integration, simcluster, claims."""
