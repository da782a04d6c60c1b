"""Watcher, placer, planner and binder in one process: work between them takes no message."""
