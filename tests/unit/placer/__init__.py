"""Tests: unit, placer."""
