"""Tests: integration, node_agent, views."""
