"""Mutations of right states, each of which an invariant finds."""
