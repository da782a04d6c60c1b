"""Tests: support, dashboard."""
