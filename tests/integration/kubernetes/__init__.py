"""Tests: integration, kubernetes."""
