"""Tests: integration, node_agent, resize."""
