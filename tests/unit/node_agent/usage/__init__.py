"""Tests: unit, node_agent, usage."""
