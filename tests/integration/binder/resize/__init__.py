"""Tests: integration, binder, resize."""
