"""Tests: unit, simcluster, apiserver, requests."""
