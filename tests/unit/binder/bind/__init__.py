"""Tests: unit, binder, bind."""
