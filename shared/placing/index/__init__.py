"""Nodes ranked by free capacity for each kind of request."""
