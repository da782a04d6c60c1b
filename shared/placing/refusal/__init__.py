"""Reasons why a pod cannot be placed, with numbers and hints."""
