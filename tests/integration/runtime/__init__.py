"""Tests: integration, runtime."""
