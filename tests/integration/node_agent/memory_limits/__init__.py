"""Tests: integration, node_agent, memory_limits."""
