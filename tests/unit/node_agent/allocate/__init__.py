"""Tests: unit, node_agent, allocate."""
