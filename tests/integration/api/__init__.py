"""Tests: integration, running_api."""
