"""Tests: integration, nats."""
