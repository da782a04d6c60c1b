"""Tests: integration, node_agent, compute_time."""
