"""Chooses a node and devices for each queued pod and reserves them, or publishes why none fit."""
