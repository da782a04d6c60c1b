"""Tests: support, running_api."""
