"""Tests: unit, dialects, kai."""
