"""The checkpoint against the kubelet and the ledger: rebuilt when lost, rid of ended pods."""
