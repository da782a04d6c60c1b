"""Tests: integration, binder, ledger_sync."""
