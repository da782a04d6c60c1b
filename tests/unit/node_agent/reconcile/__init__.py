"""Tests: unit, node_agent, reconcile."""
