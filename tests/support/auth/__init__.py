"""Tests: support, auth."""
