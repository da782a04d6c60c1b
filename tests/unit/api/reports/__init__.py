"""Tests: unit, api, reports."""
