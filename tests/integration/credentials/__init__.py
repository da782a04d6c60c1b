"""Tests: integration, credentials."""
