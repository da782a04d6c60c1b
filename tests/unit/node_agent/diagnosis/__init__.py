"""Tests: unit, node_agent, diagnosis."""
