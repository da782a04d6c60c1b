"""Tests: integration, node_agent."""
