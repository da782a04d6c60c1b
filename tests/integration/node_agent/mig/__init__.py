"""Tests: integration, node_agent, mig."""
