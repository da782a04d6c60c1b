"""Tests: support, dialects."""
