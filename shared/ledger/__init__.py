"""The ledger of leases and budgets in Redis or Valkey."""
