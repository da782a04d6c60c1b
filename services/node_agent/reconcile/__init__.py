"""Reconciles the checkpoint with kubelet and ledger: rebuilds it, and removes ended pods."""
