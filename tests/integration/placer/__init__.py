"""Tests: integration, placer."""
