"""Tests: integration, claims."""
