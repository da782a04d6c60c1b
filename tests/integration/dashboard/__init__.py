"""Tests: integration, dashboard."""
