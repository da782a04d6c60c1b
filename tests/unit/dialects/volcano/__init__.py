"""Tests: unit, dialects, volcano."""
