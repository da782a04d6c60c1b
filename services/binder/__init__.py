"""Binder: makes a placement true, and keeps the ledger in step with the cluster."""
