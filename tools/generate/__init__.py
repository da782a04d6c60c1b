"""Generators of files that are committed: chart, reference, webhook registration, pictures."""
