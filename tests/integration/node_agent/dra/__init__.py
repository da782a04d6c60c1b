"""Tests: integration, node_agent, dra."""
