"""Tests: unit, timekeeper."""
