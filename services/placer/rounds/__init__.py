"""Rounds: decide for a batch or a gang, write it to the ledger, repeat."""
