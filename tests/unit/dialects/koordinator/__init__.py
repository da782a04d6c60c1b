"""Tests: unit, dialects, koordinator."""
