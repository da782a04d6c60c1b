"""Tests: integration, simcluster."""
