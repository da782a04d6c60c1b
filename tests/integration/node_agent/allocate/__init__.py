"""Tests: integration, node_agent, allocate."""
