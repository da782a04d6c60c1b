"""Binder: binds placed pods, and keeps the ledger in sync with the cluster."""
