"""Tests: unit, node_agent, kubelet."""
