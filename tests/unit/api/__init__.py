"""Tests: unit, running_api."""
