"""Generators of files that are committed: reference, lists of the webhook's manifests, pictures."""
