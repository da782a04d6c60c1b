"""Tests: unit, watcher."""
