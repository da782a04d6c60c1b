"""Tests: integration, webhook."""
