"""Tests: unit, cli."""
