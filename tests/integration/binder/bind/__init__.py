"""Tests: integration, binder, bind."""
