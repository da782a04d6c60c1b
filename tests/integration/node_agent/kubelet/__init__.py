"""Tests: integration, node_agent, kubelet."""
