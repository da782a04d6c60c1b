"""Tests: unit, dialects, nvidia."""
