"""Tests: unit, webhook."""
