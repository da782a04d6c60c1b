"""Tests: unit, node_agent, records."""
