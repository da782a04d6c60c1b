"""Tests: e2e, one_node."""
