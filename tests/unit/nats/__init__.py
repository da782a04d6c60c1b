"""Tests: unit, nats."""
