"""Tests: unit, node_agent, enforcers."""
