"""Tests: unit, node_agent, compute_time."""
