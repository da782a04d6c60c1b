"""Tests: unit, runtime."""
