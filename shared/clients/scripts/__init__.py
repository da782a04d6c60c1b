"""The ledger's scripts, which Redis runs: see `common.lua` for what they keep."""
