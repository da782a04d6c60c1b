"""Tests: support, kubernetes."""
