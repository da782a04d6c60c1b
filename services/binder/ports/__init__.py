"""Ports: what the binder needs of the ledger, Kubernetes, NATS and metrics, with their values."""
