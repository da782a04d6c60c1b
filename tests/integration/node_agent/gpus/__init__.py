"""Tests: integration, node_agent, gpus."""
