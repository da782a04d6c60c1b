"""Tests: unit, extender."""
