"""Chooses nodes and devices for queued pods and reserves them, or publishes why none fit."""
