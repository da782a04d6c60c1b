"""Tests: unit, claims."""
