"""Tests: unit, node_agent, gpus, nvml."""
