"""Tests: unit, pods."""
