"""Tests: integration, cli, audit."""
