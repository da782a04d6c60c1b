"""Reasons why a pod cannot be placed, with hints."""
