"""Tests: unit, node_agent, container_runtime."""
