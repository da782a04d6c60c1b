"""The ledger's scripts, which Redis runs: see `common/state.lua` for what they store."""
