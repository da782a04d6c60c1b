"""Tests: unit, simcluster."""
