"""Tests: unit, node_agent."""
