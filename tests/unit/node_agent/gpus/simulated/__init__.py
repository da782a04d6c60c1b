"""Tests: unit, node_agent, gpus, simulated."""
