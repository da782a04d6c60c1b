"""Conditions and core/v1 Events of pods and nodes."""
