"""Tests: integration, node_agent, isolation."""
