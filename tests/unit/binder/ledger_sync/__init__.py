"""Tests: unit, binder, ledger_sync."""
