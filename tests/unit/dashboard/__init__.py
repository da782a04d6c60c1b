"""Tests: unit, dashboard."""
