"""Tests: unit, node_agent, dra."""
