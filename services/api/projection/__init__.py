"""The cluster in memory, as events and the ledger show it, and as one viewer may see it."""
