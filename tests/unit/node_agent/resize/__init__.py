"""Tests: unit, node_agent, resize."""
