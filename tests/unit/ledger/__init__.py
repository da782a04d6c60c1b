"""Tests: unit, ledger."""
