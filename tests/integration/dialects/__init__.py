"""Tests: integration, dialects."""
