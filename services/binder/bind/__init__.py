"""Sending Bindings, and whether a node may be bound to: agents, deferred pods, cordons."""
