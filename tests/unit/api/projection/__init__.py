"""Tests: unit, api, projection."""
