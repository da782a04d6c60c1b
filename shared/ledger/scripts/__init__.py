"""The ledger's scripts, which Redis runs: see `layout.lua` for what they keep."""
