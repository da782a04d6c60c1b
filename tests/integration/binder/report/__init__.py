"""Tests: integration, binder, report."""
