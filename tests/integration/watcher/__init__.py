"""Tests: integration, watcher."""
