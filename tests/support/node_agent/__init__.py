"""Tests: support, node_agent."""
