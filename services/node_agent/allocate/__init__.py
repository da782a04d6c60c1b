"""Allocate: admission of pods, resolution of containers, and their devices."""
