"""Tests: support, timekeeper."""
