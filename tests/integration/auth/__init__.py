"""Tests: integration, auth."""
