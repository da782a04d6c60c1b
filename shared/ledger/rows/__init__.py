"""Encoding and decoding of what the ledger's functions store and return."""
