"""Tests: integration, simcluster, apiserver, admission."""
