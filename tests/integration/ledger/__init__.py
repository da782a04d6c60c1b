"""Tests: integration, ledger."""
