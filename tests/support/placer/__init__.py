"""Tests: support, placer."""
