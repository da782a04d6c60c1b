"""Volcano: resources, annotations, configuration and metrics of its GPU sharing and its vGPUs."""
