"""Tests: unit, auth."""
