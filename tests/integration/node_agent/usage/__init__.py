"""Tests: integration, node_agent, usage."""
