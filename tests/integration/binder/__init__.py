"""Tests: integration, binder."""
