"""Tests: support, binder."""
