"""The ledger's functions, which Redis runs: see `common/ledger.lua` for what they store."""
