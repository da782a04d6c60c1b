"""Tests: unit, binder, preempt."""
