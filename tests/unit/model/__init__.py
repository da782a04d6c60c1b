"""Tests: unit, model."""
