"""Interfaces that the binder needs; adapters and tests implement them."""
