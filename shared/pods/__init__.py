"""Pods of the API server, parsed as requests; pure."""
