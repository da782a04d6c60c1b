"""Requests: their targets and parameters, lists, patches and writes."""
