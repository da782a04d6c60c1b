"""Tests: unit, node_agent, mig."""
