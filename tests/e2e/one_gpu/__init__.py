"""Tests: e2e, one_gpu."""
