"""Tests: integration, planner."""
