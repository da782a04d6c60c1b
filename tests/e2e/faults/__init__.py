"""Tests: e2e, faults."""
