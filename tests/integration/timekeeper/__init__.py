"""Tests: integration, timekeeper."""
