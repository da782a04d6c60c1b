"""Tests: integration, cli."""
