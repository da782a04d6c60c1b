"""Tests: e2e, three_nodes."""
