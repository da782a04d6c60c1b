"""Tests: unit, api, http."""
