"""Tests: unit, placing."""
