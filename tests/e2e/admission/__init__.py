"""Tests: e2e, admission."""
