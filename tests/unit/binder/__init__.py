"""Tests: unit, binder."""
