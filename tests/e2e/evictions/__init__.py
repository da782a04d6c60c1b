"""Tests: e2e, evictions."""
