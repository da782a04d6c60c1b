"""Tests: unit, binder, resize."""
