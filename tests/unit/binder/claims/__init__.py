"""Tests: unit, binder, claims."""
