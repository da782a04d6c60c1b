"""Bindings: admission by node agents, deferred pods, cordons, and the Bindings themselves."""
