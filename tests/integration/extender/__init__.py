"""Tests: integration, extender."""
