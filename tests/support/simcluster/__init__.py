"""Tests: support, simcluster."""
