"""Tests: unit, dialects."""
