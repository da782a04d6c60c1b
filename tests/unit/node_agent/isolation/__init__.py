"""Tests: unit, node_agent, isolation."""
