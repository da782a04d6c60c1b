"""Tests: unit, node_agent, mps."""
