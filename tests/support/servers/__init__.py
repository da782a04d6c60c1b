"""Tests: support, servers."""
