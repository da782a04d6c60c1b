"""Tests: unit, node_agent, views."""
