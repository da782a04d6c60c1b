"""Tests: support, planner."""
