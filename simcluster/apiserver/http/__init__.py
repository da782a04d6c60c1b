"""Requests and responses: routing, query parameters, discovery, watches, exec, representations."""
