"""Ports to the ledger, Kubernetes, NATS and metrics, with their values."""
