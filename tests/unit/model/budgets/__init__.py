"""Tests: unit, model, budgets."""
