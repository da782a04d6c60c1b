"""Tests: unit, node_agent, memory_limits."""
