"""Tests: unit, binder, report."""
