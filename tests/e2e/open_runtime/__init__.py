"""Tests: e2e, open_runtime."""
