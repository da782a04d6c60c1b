"""Encoding and decoding of what the ledger's scripts store and return."""
