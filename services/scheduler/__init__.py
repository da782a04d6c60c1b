"""Watcher, placer and binder in one process: the work between them takes no message."""
