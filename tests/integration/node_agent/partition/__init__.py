"""Tests: integration, node_agent, partition."""
