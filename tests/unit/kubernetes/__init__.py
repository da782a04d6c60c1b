"""Tests: unit, kubernetes."""
