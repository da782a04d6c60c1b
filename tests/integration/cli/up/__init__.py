"""Tests: integration, cli, up."""
