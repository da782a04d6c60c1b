"""Tests: unit, credentials."""
